"""What the ops `logits` and `sample` are told per row, and the buffers they share between launches.

Knows rows, tokens and shapes. Does not know requests, or which kernel runs. Everything is on the device and keeps its
shape from step to step, so that a captured step reads the same tensors again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

COLDEST = 1e-6
"""Below this temperature a row is greedy: its largest logit wins every draw that float32 can tell apart, and division
overflows."""
NO_TOKEN = 2**31 - 1
"""Fills the unused end of a row's list of biases."""


@dataclass(frozen=True, slots=True)
class DrawTensors:
    """One entry per row of the logits, on their device. Off: temperature 1, top_k 0, top_p 1, min_p 0."""

    temperature: torch.Tensor
    """float32; below `COLDEST`: greedy, and nothing else of the row's entries is read."""
    top_k: torch.Tensor
    """int64; 0 or at least the vocabulary: off."""
    top_p: torch.Tensor
    """float32; 0 keeps the largest and what equals it."""
    min_p: torch.Tensor
    """float32"""
    seeds: torch.Tensor
    """`[rows, 2]` int64: the low and the high 32 bits of each seed."""
    positions: torch.Tensor
    """int64: index of the token to be drawn in prompt + output."""


@dataclass(frozen=True, slots=True)
class EditTensors:
    """Changes to logits before a draw. Tables hold a line for each row that uses them; a row names its line, or -1.
    Words of bits hold token 32 * i + j in bit j of word i."""

    penalty_lines: torch.Tensor
    """`[rows]` int32: line of `prompt_bits` and `counts`; -1: no penalty."""
    repetition: torch.Tensor
    """`[rows]` float32; off: 1. Tokens of prompt or output, once: towards zero from above, away from it below."""
    frequency: torch.Tensor
    """`[rows]` float32; off: 0. Subtracted for each occurrence in the output."""
    presence: torch.Tensor
    """`[rows]` float32; off: 0. Subtracted once for a token of the output."""
    prompt_bits: torch.Tensor
    """`[lines, words]` int32: bit 1: the token is in the prompt."""
    counts: torch.Tensor
    """`[lines, vocab]` int32: occurrences in the output."""
    bias_tokens: torch.Tensor
    """`[rows, n]` int32, rising; `NO_TOKEN` behind the last one. A token may stand several times: all are added."""
    biases: torch.Tensor
    """`[rows, n]` float32; -inf bans the token."""
    mask_lines: torch.Tensor
    """`[rows]` int32: line of `mask_bits`; -1: everything is allowed."""
    mask_bits: torch.Tensor
    """`[lines, words]` int32: bit 1: the token is allowed."""


def num_words(vocab: int) -> int:
    """32-bit words for one bit per token."""
    return (vocab + 31) // 32


@dataclass(frozen=True, slots=True)
class Geometry:
    """How one row is cut: a function of the vocabulary alone, so that no row depends on how many stand beside it."""

    segments: int
    """Programs per row; a power of two."""
    segment_size: int
    """Tokens per program; the last ones may have fewer, or none."""
    runs: int
    lanes: int
    """A tile is `[runs, lanes]` neighbouring tokens; a lane keeps its largest logit."""
    chunks: int
    """Largest logits kept per segment, each of `lanes / chunks` lanes."""
    capacity: int
    """Candidates kept per segment; where a segment has more, the whole row is read again instead."""


def geometry(vocab: int, lanes: int = 512, runs: int = 4, most_segments: int = 8) -> Geometry:
    tile = lanes * runs
    segments = 1
    while segments < most_segments and segments * 8 * tile < vocab:
        segments *= 2
    size = -(-vocab // (segments * tile)) * tile
    return Geometry(segments, size, runs, lanes, chunks=lanes // 2, capacity=lanes // 2)


@dataclass(frozen=True, slots=True)
class Workspace:
    """Buffers of the compiled kernels. Written by `logits` (or by `sample`, without it) and read by `sample`."""

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
    """`[rows]` float32: no token below it is kept; behind `sample`, of rows that do not keep all, the smallest kept."""
    tails: torch.Tensor
    """`[rows, segments]` float32: sum of exponentials below the bound."""
    numbers: torch.Tensor
    """`[rows, segments]` int32: finite logits that are not below the bound."""
    candidates: torch.Tensor
    """`[rows, segments * capacity]` float32: those logits / temperature, -inf in free places."""
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
