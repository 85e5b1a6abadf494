"""Values that the engine derives from sampling parameters. The module knows no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from workers.protocol.messages import SamplingParams


def choice_seed(seed: int, index: int) -> int:
    """Returns the seed of choice `index` of a request. Choice 0 has the request's own seed, so that one choice of many
    can be asked for again alone; the others have a hash. Seeds are unsigned 64 bit integers."""
    if index == 0:
        return seed
    text = seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def end_tokens(params: SamplingParams, eos_token_ids: Sequence[int]) -> list[int]:
    """Returns every token that may end a choice, whether or not the model's own end tokens do so for this request."""
    return [*eos_token_ids, *params.stop_token_ids]


def penalizes(params: SamplingParams) -> bool:
    """Returns whether each output token changes the logits of all later ones."""
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
