"""What the engine derives from sampling parameters. Knows no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from workers.protocol.messages import SamplingParams


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index` of a request: the request's own for choice 0, so that one choice of many can be
    asked for again alone; a hash for the others. Seeds are unsigned 64 bit integers."""
    if index == 0:
        return seed
    text = seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def end_tokens(params: SamplingParams, eos_token_ids: Sequence[int]) -> list[int]:
    """Every token that may end a choice, whether or not the model's own ones do here."""
    return [*eos_token_ids, *params.stop_token_ids]


def penalizes(params: SamplingParams) -> bool:
    """Whether each output token changes the logits of all later ones."""
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
