"""The arguments per row of the ops `logits` and `sample`, and the buffers they share between launches.

It knows rows, tokens and shapes. It does not know requests, or which kernel runs. Everything is on the device and keeps
its shape from step to step, so that a captured step reads the same tensors again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

COLDEST = 1e-6
"""A row below this temperature is greedy: its largest logit wins every draw that float32 can tell apart, and division
would overflow."""
NO_TOKEN = 2**31 - 1
"""The token id that fills the unused end of a row's list of biases."""


@dataclass(frozen=True, slots=True)
class DrawTensors:
    """Sampling parameters with one entry per row of the logits, on their device. The values that turn a cut off are
    temperature 1, top_k 0, top_p 1, min_p 0."""

    temperature: torch.Tensor
    """float32; a row below `COLDEST` is greedy, and none of its other entries is read."""
    top_k: torch.Tensor
    """int64; off if it is 0 or at least the vocabulary."""
    top_p: torch.Tensor
    """float32; 0 keeps the largest logit and those equal to it."""
    min_p: torch.Tensor
    """float32"""
    seeds: torch.Tensor
    """`[rows, 2]` int64: the low and the high 32 bits of each seed."""
    positions: torch.Tensor
    """int64: index in prompt + output of the token to be drawn."""


@dataclass(frozen=True, slots=True)
class EditTensors:
    """Changes to logits before a draw. Tables hold a line for each row that uses them; a row names its line, or -1.
    Words of bits hold token 32 * i + j in bit j of word i."""

    penalty_lines: torch.Tensor
    """`[rows]` int32: line of `prompt_bits` and `counts`; -1 means no penalty."""
    repetition: torch.Tensor
    """`[rows]` float32; 1 is off. It changes tokens of prompt or output once: positive logits move towards zero,
    negative ones away from it."""
    frequency: torch.Tensor
    """`[rows]` float32; 0 is off. It is subtracted for each occurrence in the output."""
    presence: torch.Tensor
    """`[rows]` float32; 0 is off. It is subtracted once for a token of the output."""
    prompt_bits: torch.Tensor
    """`[lines, words]` int32: a bit is 1 if the token is in the prompt."""
    counts: torch.Tensor
    """`[lines, vocab]` int32: occurrences in the output."""
    bias_tokens: torch.Tensor
    """`[rows, n]` int32, rising, with `NO_TOKEN` after the last one. A token may occur several times: all its biases
    are added."""
    biases: torch.Tensor
    """`[rows, n]` float32; -inf bans the token."""
    mask_lines: torch.Tensor
    """`[rows]` int32: line of `mask_bits`; -1 means that every token is allowed."""
    mask_bits: torch.Tensor
    """`[lines, words]` int32: a bit is 1 if the token is allowed."""


def num_words(vocab: int) -> int:
    """Returns the number of 32-bit words for one bit per token."""
    return (vocab + 31) // 32


@dataclass(frozen=True, slots=True)
class Geometry:
    """The partition of one row. It is a function of the vocabulary alone, so that no row depends on the number of other
    rows."""

    segments: int
    """Programs per row; a power of two."""
    segment_size: int
    """Tokens per program; the last ones may have fewer, or none."""
    runs: int
    lanes: int
    """A tile is `[runs, lanes]` neighbouring tokens; a lane keeps its largest logit."""
    chunks: int
    """Number of largest logits kept per segment, each of `lanes / chunks` lanes."""
    capacity: int
    """Number of candidates kept per segment; if a segment has more, the whole row is read again instead."""


def geometry(vocab: int, lanes: int = 512, runs: int = 4, most_segments: int = 8) -> Geometry:
    tile = lanes * runs
    segments = 1
    while segments < most_segments and segments * 8 * tile < vocab:
        segments *= 2
    size = -(-vocab // (segments * tile)) * tile
    return Geometry(segments, size, runs, lanes, chunks=lanes // 2, capacity=lanes // 2)


@dataclass(frozen=True, slots=True)
class Workspace:
    """Buffers of the compiled kernels. They are written by `logits` (or by `sample`, without it) and read by
    `sample`."""

    geometry: Geometry
    peaks: torch.Tensor
    """`[rows, 4, segments]` float32: largest logit / temperature, its sum of exponentials; the same of raw logits."""
    chunk_peaks: torch.Tensor
    """`[rows, segments * chunks]` float32"""
    best_scores: torch.Tensor
    """`[rows, segments]` float32: logit - noise of the best token of a segment, of rows that keep all tokens."""
    best_tokens: torch.Tensor
    """`[rows, segments]` int32; of greedy rows the first token with the segment's largest logit."""
    bounds: torch.Tensor
    """`[rows]` float32: no token below this bound is kept; after `sample` it is the smallest kept logit of rows that do
    not keep all."""
    tails: torch.Tensor
    """`[rows, segments]` float32: sum of exponentials below the bound."""
    numbers: torch.Tensor
    """`[rows, segments]` int32: finite logits that are not below the bound."""
    candidates: torch.Tensor
    """`[rows, segments * capacity]` float32: those logits / temperature, -inf in free entries."""
    candidate_tokens: torch.Tensor
    """`[rows, segments * capacity]` int32"""

    @classmethod
    def create(cls, max_rows: int, shape: Geometry, device: torch.device) -> Workspace:
        def empty(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty((max_rows, *sizes), dtype=dtype, device=device)

        segments, places = shape.segments, shape.segments * shape.capacity
        return cls(
            shape,
            peaks=empty(4, segments),
            chunk_peaks=empty(segments * shape.chunks),
            best_scores=empty(segments),
            best_tokens=empty(segments, dtype=torch.int32),
            bounds=empty(),
            tails=empty(segments),
            numbers=empty(segments, dtype=torch.int32),
            candidates=empty(places),
            candidate_tokens=empty(places, dtype=torch.int32),
        )
