"""The logprobs of a prompt, packed in parts, because one frame may have 200,000 of them.

Whoever reads the frame copies bytes. The parts are decoded where nobody waits for it, and none of them takes longer than
a few milliseconds, during which no other thread of the process computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from workers.protocol.messages import TokenLogprob

PART_ENTRIES = 1024
"""The most logprobs of a part, unless one position has more."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[TokenLogprob | None, ...])


def pack(logprobs: Sequence[TokenLogprob | None]) -> tuple[bytes, ...]:
    """Returns the parts, in the order of the prompt. The first token of a prompt has no logprob."""
    num_each = 1 + max((len(one.top) for one in logprobs if one is not None), default=0)
    step = max(1, PART_ENTRIES // num_each)
    return tuple(_encoder.encode(logprobs[start : start + step]) for start in range(0, len(logprobs), step))


def unpack(parts: Sequence[bytes]) -> Iterator[tuple[TokenLogprob | None, ...]]:
    """Yields part by part, one entry per token of the prompt. Raises `msgspec.DecodeError`."""
    return map(_decoder.decode, parts)
