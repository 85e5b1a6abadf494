"""Seeds of choices. Knows no torch, so that the engine can derive them."""

from __future__ import annotations

import hashlib


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index` of a request: the request's own for choice 0, so that one choice of many can be
    asked for again alone; a hash for the others. Seeds are unsigned 64 bit integers."""
    if index == 0:
        return seed
    text = seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
