"""Draws one token per row without a sort, and compares proposals with draws.

There are three launches. `scan` (kernels.triton.sampling.logits) reads each row once and writes the largest logits of
many small chunks; from them `_collect` derives a bound that no kept token lies below, and lists the few tokens above
it; `_finish` finds the exact thresholds among those and draws. A row with more candidates than the list can hold is
searched as a whole. Rows that keep all tokens are drawn segment by segment in `_collect`; greedy rows are done after
the scan. Thresholds: `kernels.triton.sampling.threshold`. Noise: `kernels.triton.sampling.noise`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.arguments.draws import COLDEST, DrawTensors, Geometry, Workspace
from kernels.triton.sampling.logits import LOG2E, scan, select
from kernels.triton.sampling.noise import log_exponential, noise_words
from kernels.triton.sampling.threshold import append, bound_of, threshold_of
from kernels.triton.specimen import Budget, Specimen

_COLDEST = tl.constexpr(COLDEST)
_INFINITY = tl.constexpr(float("inf"))
_LAST = tl.constexpr(2**31 - 1)
_COLLECT_WARPS, _FINISH_WARPS, _FINISH_BLOCK = 4, 8, 1024


@triton.jit
def _filters(top_k, top_p, min_p, row, vocab):
    """Returns the row's numbers, and whether top-k and whether anything cuts."""
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    least = tl.load(min_p + row)
    by_k = (k > 0) & (k < vocab)
    return tl.minimum(k, vocab).to(tl.int32), p, least, by_k, by_k | (p < 1.0) | (least > 0.0)


@triton.jit
def _row_mass(peaks, row, SEGMENTS: tl.constexpr, FIRST: tl.constexpr):
    """Returns the largest value of a row and its sum of exponentials, from those of the segments."""
    place = peaks + (row * 4 + FIRST) * SEGMENTS + tl.arange(0, SEGMENTS)
    part = tl.load(place)
    peak = tl.max(part, axis=0)
    peak = tl.where(peak == -_INFINITY, 0.0, peak)
    return peak, tl.sum(tl.load(place + SEGMENTS) * tl.exp2((part - peak) * LOG2E), axis=0)


@triton.jit
def _draw_dense(logits, row, start, end, divisor, lowest, seeds, positions, QUADS: tl.constexpr):
    """Returns the score and token of the best noisy logit of neighbouring tokens, of those not below `lowest`."""
    quad = tl.arange(0, QUADS)
    divisor = divisor + tl.zeros((QUADS, 4), tl.float32)
    best = tl.full((QUADS, 4), -_INFINITY, tl.float32)
    token = tl.zeros((QUADS, 4), tl.int32)
    for first in range(start, end, QUADS * 4):
        column = first + quad[:, None] * 4 + tl.arange(0, 4)[None, :]
        value = tl.load(logits + column, mask=column < end, other=-_INFINITY)
        value = tl.div_rn(value, divisor)
        w0, w1, w2, w3 = noise_words(seeds, positions, row, (first >> 2) + quad)
        word = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (QUADS, 4))
        score = tl.where(value >= lowest, value - log_exponential(word), -_INFINITY)
        token = tl.where(score > best, column, token)
        best = tl.maximum(best, score)
    return _first_best(tl.reshape(best, (QUADS * 4,)), tl.reshape(token, (QUADS * 4,)))


@triton.jit
def _first_best(score, token):
    best = tl.max(score, axis=0)
    return best, tl.min(tl.where(score == best, token, _LAST), axis=0)


@triton.jit
def _collect(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    seeds,
    positions,
    peaks,
    chunk_peaks,
    best_scores,
    best_tokens,
    bounds,
    tails,
    numbers,
    candidates,
    candidate_tokens,
    vocab,
    stride,
    SEGMENT: tl.constexpr,
    SEGMENTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
    SCALED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1)
    heat = tl.load(temperature + row)
    if heat < _COLDEST:
        return
    divisor = heat
    if SCALED:
        divisor = 1.0
    logits += row * stride
    place = row * SEGMENTS + segment
    start = segment * SEGMENT
    end = tl.minimum(vocab, start + SEGMENT)
    k, p, least, by_k, cut = _filters(top_k, top_p, min_p, row, vocab)
    if not cut:
        score, token = _draw_dense(logits, row, start, end, divisor, -_INFINITY, seeds, positions, TILE // 4)
        tl.store(best_scores + place, score)
        tl.store(best_tokens + place, token)
        return
    peak, mass = _row_mass(peaks, row, SEGMENTS, 0)
    bound = bound_of(chunk_peaks, row, peak, mass, k, p, least, by_k, vocab, SEGMENTS * CHUNKS)
    tl.store(bounds + row, bound)  # every segment stores the same
    column = tl.arange(0, TILE)
    tail = tl.zeros((TILE,), tl.float32)
    divided = divisor + tl.zeros((TILE,), tl.float32)
    number = 0
    slot = place * CAPACITY
    for first in range(start, end, TILE):
        token = first + column
        value = tl.load(logits + token, mask=token < end, other=-_INFINITY)
        value = tl.div_rn(value, divided)
        found = (value >= bound) & (value > -_INFINITY)
        tail += tl.where(found, 0.0, tl.exp2((value - peak) * LOG2E))
        number = append(candidates + slot, candidate_tokens + slot, number, CAPACITY, value, token, found, True)
    free = tl.arange(0, CAPACITY)
    tl.store(candidates + slot + free, free.to(tl.float32) - _INFINITY, mask=free >= number)
    tl.store(numbers + place, number)
    tl.store(tails + place, tl.sum(tail, axis=0))


@triton.jit
def _draw_listed(source, tokens, row, count, lowest, seeds, positions, BLOCK: tl.constexpr):
    """Returns the token of the best noisy value of a list, of those not below `lowest`."""
    best = tl.full((BLOCK,), -_INFINITY, tl.float32)
    chosen = tl.full((BLOCK,), _LAST, tl.int32)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        value = tl.load(source + place, mask=place < count, other=-_INFINITY)
        kept = (value >= lowest) & (value > -_INFINITY)
        if tl.max(kept.to(tl.int32), axis=0) > 0:
            token = tl.load(tokens + place, mask=kept, other=0)
            w0, w1, w2, w3 = noise_words(seeds, positions, row, token >> 2)
            part = token & 3
            word = tl.where(part < 2, tl.where(part == 0, w0, w1), tl.where(part == 2, w2, w3))
            score = tl.where(kept, value - log_exponential(word), -_INFINITY)
            earlier = (score > best) | ((score == best) & (token < chosen))
            chosen = tl.where(kept & earlier, token, chosen)
            best = tl.maximum(best, score)
    best, token = _first_best(best, chosen)
    return tl.where(token == _LAST, 0, token)


@triton.jit
def _finish(
    out,
    logprobs,
    logits,
    raw,
    temperature,
    top_k,
    top_p,
    min_p,
    seeds,
    positions,
    peaks,
    best_scores,
    best_tokens,
    bounds,
    tails,
    numbers,
    candidates,
    candidate_tokens,
    vocab,
    stride,
    raw_stride,
    SEGMENTS: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
    LOGPROBS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    segment = row * SEGMENTS + tl.arange(0, SEGMENTS)
    heat = tl.load(temperature + row)
    greedy = heat < _COLDEST
    k, p, least, by_k, cut = _filters(top_k, top_p, min_p, row, vocab)
    if greedy | (not cut):
        score = tl.load(peaks + row * 4 * SEGMENTS + tl.arange(0, SEGMENTS))
        if not greedy:
            score = tl.load(best_scores + segment)
        _best, token = _first_best(score, tl.load(best_tokens + segment))
    else:
        peak, mass = _row_mass(peaks, row, SEGMENTS, 0)
        bound = tl.load(bounds + row)
        tail = tl.sum(tl.load(tails + segment), axis=0)
        number = tl.load(numbers + segment)
        found = tl.sum(number, axis=0)
        spare = candidates + row * SEGMENTS * CAPACITY
        tokens = candidate_tokens + row * SEGMENTS * CAPACITY
        logits += row * stride
        divisor = heat
        if SCALED:
            divisor = 1.0
        listed = tl.max(number, axis=0) <= CAPACITY
        if listed:
            source, count, factor = spare, SEGMENTS * CAPACITY, 1.0
        else:
            source, count, factor = logits, vocab, divisor
        lowest = threshold_of(
            source, count, factor, peak, mass, bound, tail, found, k, p, least, by_k, spare, SEGMENTS * CAPACITY, BLOCK
        )
        if listed:
            token = _draw_listed(spare, tokens, row, count, lowest, seeds, positions, BLOCK)
        else:
            score, token = _draw_dense(logits, row, 0, vocab, divisor, lowest, seeds, positions, BLOCK // 4)
        tl.store(bounds + row, lowest)
    token = tl.minimum(token, vocab - 1)  # whatever the logits: an id beyond would be read by the next step
    tl.store(out + row, token.to(tl.int64))
    if LOGPROBS:
        peak, mass = _row_mass(peaks, row, SEGMENTS, 2)
        tl.store(logprobs + row, tl.load(raw + row * raw_stride + token) - peak - tl.log(mass))


def sample(
    logits: torch.Tensor,
    draws: DrawTensors,
    tokens: torch.Tensor | None = None,
    logprobs: torch.Tensor | None = None,
    raw: torch.Tensor | None = None,
    workspace: Workspace | None = None,
) -> torch.Tensor:
    """Computes the same as its twin in `kernels.reference.sample`. With `raw`, `workspace` holds the scan that `logits`
    wrote."""
    rows, vocab = logits.shape
    assert raw is None or workspace is not None, "what wrote the logits from `raw` left its scan in a workspace"
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device) if tokens is None else tokens
    if workspace is None:
        workspace = Workspace.create(rows, select(vocab), logits.device)
    if raw is None:
        scan(logits, draws.temperature, workspace, logprobs is not None)
    shape = workspace.geometry
    numbers = (draws.top_k, draws.top_p, draws.min_p, draws.seeds, draws.positions)
    listed = (workspace.bounds, workspace.tails, workspace.numbers)
    places = (workspace.candidates, workspace.candidate_tokens)
    _collect[(rows, shape.segments)](
        logits,
        draws.temperature,
        *numbers,
        workspace.peaks,
        workspace.chunk_peaks,
        workspace.best_scores,
        workspace.best_tokens,
        *listed,
        *places,
        vocab,
        logits.stride(0),
        **_collect_constants(shape, raw is not None),
        num_warps=_COLLECT_WARPS,
    )
    _finish[(rows,)](
        tokens,
        logits if logprobs is None else logprobs,
        logits,
        logits if raw is None else raw,
        draws.temperature,
        *numbers,
        workspace.peaks,
        workspace.best_scores,
        workspace.best_tokens,
        *listed,
        *places,
        vocab,
        logits.stride(0),
        (logits if raw is None else raw).stride(0),
        **_finish_constants(shape, raw is not None, logprobs is not None),
        num_warps=_FINISH_WARPS,
    )
    return tokens


def _collect_constants(shape: Geometry, scaled: bool) -> dict[str, Any]:
    return {
        "SEGMENT": shape.segment_size,
        "SEGMENTS": shape.segments,
        "CHUNKS": shape.chunks,
        "CAPACITY": shape.capacity,
        "TILE": shape.runs * shape.lanes // 2,
        "SCALED": scaled,
    }


def _finish_constants(shape: Geometry, scaled: bool, with_logprobs: bool) -> dict[str, Any]:
    return {
        "SEGMENTS": shape.segments,
        "CAPACITY": shape.capacity,
        "BLOCK": _FINISH_BLOCK,
        "SCALED": scaled,
        "LOGPROBS": with_logprobs,
    }


@triton.jit
def _verify(accepted, following, draws, proposals, numbers, most, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    number = tl.load(numbers + row)
    proposed = place < number
    draw = tl.load(draws + row * (most + 1) + place, mask=proposed, other=0)
    proposal = tl.load(proposals + row * most + place, mask=proposed, other=0)
    equal = proposed & (draw == proposal)
    count = tl.min(tl.where(equal, BLOCK, place), axis=0)
    tl.store(accepted + row, count)
    tl.store(following + row, tl.load(draws + row * (most + 1) + count))


def verify(
    accepted: torch.Tensor, following: torch.Tensor, draws: torch.Tensor, proposals: torch.Tensor, numbers: torch.Tensor
) -> None:
    """Computes the same as its twin in `kernels.reference.sample`."""
    rows, most = proposals.shape
    _verify[(rows,)](
        accepted, following, draws, proposals, numbers, most, BLOCK=triton.next_power_of_2(most + 1), num_warps=1
    )


def specimens(capability: int) -> Iterator[Specimen]:
    real, whole, long = torch.float32, torch.int32, torch.int64
    numbers = (long, real, real, long, long)
    for vocab, scaled in ((151_936, False), (151_936, True), (50_257, False)):
        shape = select(vocab)
        yield Specimen(
            f"collect {vocab}{' scaled' if scaled else ''}",
            _collect,
            (real, real, *numbers, real, real, real, whole, real, real, whole, real, whole, vocab, vocab),
            _collect_constants(shape, scaled),
            Budget(registers=128),
            num_warps=_COLLECT_WARPS,
        )
    for vocab, scaled in ((151_936, False), (151_936, True), (1000, False)):
        yield Specimen(
            f"finish {vocab}{' scaled' if scaled else ''}",
            _finish,
            (
                long,
                real,
                real,
                real,
                real,
                *numbers,
                real,
                real,
                whole,
                real,
                real,
                whole,
                real,
                whole,
                vocab,
                vocab,
                vocab,
            ),
            _finish_constants(select(vocab), scaled, True),
            Budget(registers=128),
            num_warps=_FINISH_WARPS,
        )
    yield Specimen(
        "verify", _verify, (whole, long, long, long, whole, 7), {"BLOCK": 8}, Budget(registers=32), num_warps=1
    )
