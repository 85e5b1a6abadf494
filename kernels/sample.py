"""One token per row without a sort, and the check of proposals against draws.

Three launches. `scan` (kernels.logits) reads each row once and leaves the largest logits of many small chunks; from
them `_collect` derives a bound that no kept token lies below, and lists the few tokens above it; `_finish` finds the
exact thresholds among those and draws. A row with more candidates than there are places is searched as a whole.
Rows that keep all tokens are drawn segment by segment in `_collect`; greedy rows are done after the scan.

Thresholds are found by a search over order-preserving integer keys of the floats, so that ties stay together:
top-k keeps what is not below the largest key with at least k tokens from it on; top-p keeps a token if the
probabilities up to it, from the smallest on, exceed 1 - p. Noise: `kernels.reference.sample`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.draws import COLDEST, DrawTensors, Geometry, Workspace
from kernels.logits import LOG2E, scan, select
from kernels.specimen import Budget, Specimen

_COLDEST = tl.constexpr(COLDEST)
_INFINITY = tl.constexpr(float("inf"))
_LAST = tl.constexpr(2**31 - 1)
_PURPOSE_SAMPLE = tl.constexpr(0)
_LARGEST_BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)
_LEAST = tl.constexpr(-3.4028234663852886e38)
"""The smallest finite float32."""
_MARGIN = tl.constexpr(1e-5)
"""Relative error allowed to sums of float32 where they only bound a threshold."""
_WAYS = tl.constexpr(8)
"""Pivots of one pass of the search: the interval shrinks ninefold."""
_WHOLE_PASSES = tl.constexpr(3)
"""Over a whole row, before what is left is listed: 9**3 parts of 150,000 tokens."""
_COLLECT_WARPS, _FINISH_WARPS, _FINISH_BLOCK = 4, 8, 1024


@triton.jit
def _philox(c0, c1, c2, c3, k0, k1):
    """Philox4x32-10 (Salmon and others 2011) on unsigned 32-bit words."""
    for _ in tl.static_range(10):
        product0 = c0.to(tl.uint64) * 0xD2511F53
        product1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = product1.to(tl.uint32)
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = product0.to(tl.uint32)
        k0 = (k0.to(tl.uint64) + 0x9E3779B9).to(tl.uint32)
        k1 = (k1.to(tl.uint64) + 0xBB67AE85).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def _words(seeds, positions, row, quad):
    """The four words of the tokens of each quad."""
    zero = tl.zeros_like(quad).to(tl.uint32)
    position = tl.load(positions + row).to(tl.uint32) + zero
    low = tl.load(seeds + row * 2).to(tl.uint32) + zero
    high = tl.load(seeds + row * 2 + 1).to(tl.uint32) + zero
    return _philox(position, quad.to(tl.uint32), zero + _PURPOSE_SAMPLE, zero, low, high)


@triton.jit
def _log_exponential(word):
    uniform = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, _LARGEST_BELOW_ONE)
    small = uniform + 0.5 * uniform * uniform
    return tl.log(tl.where(uniform < 0.0009765625, small, -tl.log(1.0 - uniform)))


@triton.jit
def _key(value):
    """Signed integers in the order of the floats; both zeros have one key."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _filters(top_k, top_p, min_p, row, vocab):
    """The row's numbers, and whether top-k and whether anything cuts."""
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    least = tl.load(min_p + row)
    by_k = (k > 0) & (k < vocab)
    return tl.minimum(k, vocab).to(tl.int32), p, least, by_k, by_k | (p < 1.0) | (least > 0.0)


@triton.jit
def _row_mass(peaks, row, SEGMENTS: tl.constexpr, FIRST: tl.constexpr):
    """Largest value of a row and its sum of exponentials, from those of the segments."""
    place = peaks + (row * 4 + FIRST) * SEGMENTS + tl.arange(0, SEGMENTS)
    part = tl.load(place)
    peak = tl.max(part, axis=0)
    peak = tl.where(peak == -_INFINITY, 0.0, peak)
    return peak, tl.sum(tl.load(place + SEGMENTS) * tl.exp2((part - peak) * LOG2E), axis=0)


@triton.jit
def _bound(chunk_peaks, row, peak, mass, k, p, least, by_k, vocab, CHUNKS: tl.constexpr):
    """A value that no kept token is below. The k-th largest of some of the logits is not above the k-th largest of
    all; likewise for masses. And what all tokens could weigh together, if they lay at a value."""
    value = tl.load(chunk_peaks + row * CHUNKS + tl.arange(0, CHUNKS))
    key = _key(value)
    weight = tl.where(by_k, 1.0, tl.exp2((value - peak) * LOG2E))
    goal = tl.where(by_k, k.to(tl.float32), tl.where(p < 1.0, (p + _MARGIN) * mass, _INFINITY))
    low = _key(tl.full((), -_INFINITY, tl.float32)).to(tl.int64)
    high = _key(peak).to(tl.int64) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        if tl.sum(tl.where(key >= middle.to(tl.int32), weight, 0.0), axis=0) >= goal:
            low = middle
        else:
            high = middle
    bound = _value(low.to(tl.int32))
    if not by_k:
        if p < 1.0:
            each = (1.0 - p) * (1.0 - _MARGIN) * mass / vocab
            bound = tl.maximum(bound, peak + tl.log(tl.maximum(each, 1e-30)))
        bound = tl.maximum(bound, _floor(peak, least))
    return tl.minimum(bound, peak)


@triton.jit
def _floor(peak, least):
    """min-p compares with the largest probability: the normalisation cancels."""
    return tl.where(least > 0.0, peak + tl.log(tl.where(least > 0.0, least, 1.0)), -_INFINITY)


@triton.jit
def _draw_dense(
    logits, row, start, end, divisor, lowest, seeds, positions, QUADS: tl.constexpr
):  # fmt: skip
    """Score and token of the best noisy logit of neighbouring tokens, of those not below `lowest`."""
    quad = tl.arange(0, QUADS)
    divisor = divisor + tl.zeros((QUADS, 4), tl.float32)
    best = tl.full((QUADS, 4), -_INFINITY, tl.float32)
    token = tl.zeros((QUADS, 4), tl.int32)
    for first in range(start, end, QUADS * 4):
        column = first + quad[:, None] * 4 + tl.arange(0, 4)[None, :]
        value = tl.load(logits + column, mask=column < end, other=-_INFINITY)
        value = tl.div_rn(value, divisor)
        w0, w1, w2, w3 = _words(seeds, positions, row, (first >> 2) + quad)
        word = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (QUADS, 4))
        score = tl.where(value >= lowest, value - _log_exponential(word), -_INFINITY)
        token = tl.where(score > best, column, token)
        best = tl.maximum(best, score)
    return _first_best(tl.reshape(best, (QUADS * 4,)), tl.reshape(token, (QUADS * 4,)))


@triton.jit
def _first_best(score, token):
    best = tl.max(score, axis=0)
    return best, tl.min(tl.where(score == best, token, _LAST), axis=0)


@triton.jit
def _append(values, tokens, number, capacity, value, token, found, WITH_TOKENS: tl.constexpr):
    """Writes the found values behind `number` earlier ones, as far as there is room; gives the number of all."""
    here = tl.sum(found.to(tl.int32), axis=0)
    if here > 0:
        index = number + tl.cumsum(found.to(tl.int32), axis=0) - 1
        listed = found & (index < capacity)
        tl.store(values + index, value, mask=listed)
        if WITH_TOKENS:
            tl.store(tokens + index, token, mask=listed)
    return number + here


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
        score, token = _draw_dense(
            logits, row, start, end, divisor, -_INFINITY, seeds, positions, TILE // 4
        )
        tl.store(best_scores + place, score)
        tl.store(best_tokens + place, token)
        return
    peak, mass = _row_mass(peaks, row, SEGMENTS, 0)
    bound = _bound(chunk_peaks, row, peak, mass, k, p, least, by_k, vocab, SEGMENTS * CHUNKS)
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
        number = _append(
            candidates + slot, candidate_tokens + slot, number, CAPACITY, value, token, found, True
        )
    free = tl.arange(0, CAPACITY)
    tl.store(candidates + slot + free, free.to(tl.float32) - _INFINITY, mask=free >= number)
    tl.store(numbers + place, number)
    tl.store(tails + place, tl.sum(tail, axis=0))


@triton.jit
def _pivots(low, high, by_value):
    """Keys between two, evenly spaced as values or as keys. Values converge fast where logits are dense; keys always
    do, also around zero."""
    part = 1 + tl.arange(0, _WAYS)
    pivot = low + part * ((high - low + _WAYS) // (_WAYS + 1))
    below, above = _value(low.to(tl.int32)), _value((high - 1).to(tl.int32))
    if by_value & (below > _LEAST):
        value = below + (above - below) * (part.to(tl.float32) / (_WAYS + 1))
        pivot = tl.maximum(_key(value).to(tl.int64), low + part)
    return tl.minimum(pivot, high)


@triton.jit
def _narrow(
    source,
    count,
    divisor,
    peak,
    low,
    high,
    limit,
    most,
    BY_COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of keys from `low` to below `high`, the part that holds the largest one below which the values weigh at most
    `limit`: their number, or the sum of their exponentials. Values below the first `low` weigh nothing. Ends with one
    key, or after `most` passes; gives the two ends and what lies below the lower one."""
    divided = divisor + tl.zeros((BLOCK,), tl.float32)
    first = low.to(tl.int32)
    passed = 0.0
    turn = 0
    while (high - low > 1) & (turn < most):
        pivot = _pivots(low, high, turn % 2 == 0)
        compared = pivot.to(tl.int32)
        below = tl.zeros((_WAYS, BLOCK), tl.float32)
        for start in range(0, count, BLOCK):
            place = start + tl.arange(0, BLOCK)
            value = tl.load(source + place, mask=place < count, other=-_INFINITY)
            value = tl.div_rn(value, divided)
            key = _key(value)
            weight = 1.0
            if not BY_COUNT:
                weight = tl.exp2((value - peak) * LOG2E)
            weight = tl.where((key >= first) & (value > -_INFINITY), weight, 0.0)
            below += tl.where(key[None, :] < compared[:, None], weight[None, :], 0.0)
        weighed = tl.sum(below, axis=1)
        feasible = (weighed <= limit) & (pivot < high)
        passed = tl.maximum(passed, tl.max(tl.where(feasible, weighed, 0.0), axis=0))
        low = tl.maximum(low, tl.max(tl.where(feasible, pivot, low), axis=0))
        high = tl.minimum(high, tl.min(tl.where(feasible, high, pivot), axis=0))
        turn += 1
    return low, high, passed


@triton.jit
def _search(
    source,
    count,
    divisor,
    peak,
    lowest,
    limit,
    spare,
    SPARE: tl.constexpr,
    BY_COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest key, from `lowest` on, below which the values weigh at most `limit`. A source longer than `SPARE` is
    narrowed until what is left fits in `spare`, and then left alone."""
    low, high = lowest.to(tl.int64), _key(peak).to(tl.int64) + 1
    if count > SPARE:
        passes = tl.where(_value(lowest) == _LEAST, _WHOLE_PASSES + 2, _WHOLE_PASSES)
        low, high, passed = _narrow(
            source, count, divisor, peak, low, high, limit, passes, BY_COUNT, BLOCK
        )
        number = 0
        divided = divisor + tl.zeros((BLOCK,), tl.float32)
        tl.debug_barrier()  # `spare` may still be read for the search before
        for start in range(0, count, BLOCK):
            place = start + tl.arange(0, BLOCK)
            value = tl.load(source + place, mask=place < count, other=-_INFINITY)
            value = tl.div_rn(value, divided)
            key = _key(value)
            found = (key >= low.to(tl.int32)) & (key < high.to(tl.int32)) & (value > -_INFINITY)
            number = _append(spare, spare, number, SPARE, value, value, found, False)
        tl.debug_barrier()
        if number <= SPARE:
            source, count, divisor = spare, number, 1.0
            limit -= passed
        else:
            low = lowest.to(tl.int64)
    low, high, passed = _narrow(
        source, count, divisor, peak, low, high, limit, _LAST, BY_COUNT, BLOCK
    )
    return low.to(tl.int32)


@triton.jit
def _mass_from(source, count, divisor, peak, lowest, BLOCK: tl.constexpr):
    """Sum of the exponentials of values whose key is not below `lowest`."""
    divided = divisor + tl.zeros((BLOCK,), tl.float32)
    mass = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        value = tl.load(source + place, mask=place < count, other=-_INFINITY)
        value = tl.div_rn(value, divided)
        mass += tl.where(_key(value) >= lowest, tl.exp2((value - peak) * LOG2E), 0.0)
    return tl.sum(mass, axis=0)


@triton.jit
def _draw_listed(source, tokens, row, count, lowest, seeds, positions, BLOCK: tl.constexpr):
    """Token of the best noisy value of a list, of those not below `lowest`."""
    best = tl.full((BLOCK,), -_INFINITY, tl.float32)
    chosen = tl.full((BLOCK,), _LAST, tl.int32)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        value = tl.load(source + place, mask=place < count, other=-_INFINITY)
        kept = (value >= lowest) & (value > -_INFINITY)
        if tl.max(kept.to(tl.int32), axis=0) > 0:
            token = tl.load(tokens + place, mask=kept, other=0)
            w0, w1, w2, w3 = _words(seeds, positions, row, token >> 2)
            part = token & 3
            word = tl.where(part < 2, tl.where(part == 0, w0, w1), tl.where(part == 2, w2, w3))
            score = tl.where(kept, value - _log_exponential(word), -_INFINITY)
            earlier = (score > best) | ((score == best) & (token < chosen))
            chosen = tl.where(kept & earlier, token, chosen)
            best = tl.maximum(best, score)
    best, token = _first_best(best, chosen)
    return tl.where(token == _LAST, 0, token)


@triton.jit
def _threshold(
    source,
    count,
    divisor,
    peak,
    mass,
    bound,
    tail,
    found,
    k,
    p,
    least,
    by_k,
    spare,
    SPARE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The smallest value kept by top-k, top-p and min-p, each on what the one before left. `found` values are not
    below `bound`, and those below it weigh `tail`."""
    lowest = _key(tl.maximum(bound, _LEAST))
    if by_k:
        if found > k:
            limit = (found - k).to(tl.float32)
            lowest = _search(source, count, divisor, peak, lowest, limit, spare, SPARE, True, BLOCK)
        if p < 1.0:
            mass = _mass_from(source, count, divisor, peak, lowest, BLOCK)
        tail = 0.0
    if p < 1.0:
        limit = (1.0 - p) * mass - tail
        if limit >= 0.0:
            lowest = _search(
                source, count, divisor, peak, lowest, limit, spare, SPARE, False, BLOCK
            )
        if p <= 0.0:
            lowest = _key(peak)
    return tl.maximum(_value(lowest), _floor(peak, least))


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
        lowest = _threshold(
            source, count, factor, peak, mass, bound, tail, found, k, p, least, by_k,
            spare, SEGMENTS * CAPACITY, BLOCK,
        )  # fmt: skip
        if listed:
            token = _draw_listed(spare, tokens, row, count, lowest, seeds, positions, BLOCK)
        else:
            score, token = _draw_dense(
                logits, row, 0, vocab, divisor, lowest, seeds, positions, BLOCK // 4
            )
        tl.store(bounds + row, lowest)
    token = tl.minimum(
        token, vocab - 1
    )  # whatever the logits: an id beyond would be read by the next step
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
    """As the twin in `kernels.reference.sample`. With `raw`, `workspace` holds the scan that `logits` left there."""
    rows, vocab = logits.shape
    tokens = (
        torch.empty(rows, dtype=torch.int64, device=logits.device) if tokens is None else tokens
    )
    if workspace is None:
        workspace = Workspace.create(rows, select(vocab), logits.device)
        scan(logits if raw is None else raw, draws.temperature, workspace, logprobs is not None)
    elif raw is None:
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
    accepted: torch.Tensor,
    following: torch.Tensor,
    draws: torch.Tensor,
    proposals: torch.Tensor,
    numbers: torch.Tensor,
) -> None:
    """As the twin in `kernels.reference.sample`."""
    rows, most = proposals.shape
    _verify[(rows,)](
        accepted, following, draws, proposals, numbers, most,
        BLOCK=triton.next_power_of_2(most + 1), num_warps=1,
    )  # fmt: skip


def specimens(capability: int) -> Iterator[Specimen]:
    real, whole, long = torch.float32, torch.int32, torch.int64
    numbers = (long, real, real, long, long)
    for vocab, scaled in ((151_936, False), (151_936, True), (50_257, False)):
        shape = select(vocab)
        yield Specimen(
            f"collect {vocab}{' scaled' if scaled else ''}",
            _collect,
            (real, real, *numbers, real, real, real, whole, real, real, whole, real, whole,
             vocab, vocab),
            _collect_constants(shape, scaled),
            Budget(registers=128),
            num_warps=_COLLECT_WARPS,
        )  # fmt: skip
    for vocab, scaled in ((151_936, False), (151_936, True), (1000, False)):
        yield Specimen(
            f"finish {vocab}{' scaled' if scaled else ''}",
            _finish,
            (long, real, real, real, real, *numbers, real, real, whole, real, real, whole, real,
             whole, vocab, vocab, vocab),
            _finish_constants(select(vocab), scaled, True),
            Budget(registers=128),
            num_warps=_FINISH_WARPS,
        )  # fmt: skip
    yield Specimen(
        "verify",
        _verify,
        (whole, long, long, long, whole, 7),
        {"BLOCK": 8},
        Budget(registers=32),
        num_warps=1,
    )
