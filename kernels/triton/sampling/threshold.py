"""Thresholds of top-k, top-p and min-p inside Triton kernels, without a sort.

It knows values in memory and their keys: signed integers in the order of the floats, so that ties stay together. Top-k
keeps what is not below the largest key with at least k values from it on; top-p keeps a value if the probabilities up
to it, from the smallest on, exceed 1 - p.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.sampling.logits import LOG2E

_INFINITY = tl.constexpr(float("inf"))
_LAST = tl.constexpr(2**31 - 1)
_LEAST = tl.constexpr(-3.4028234663852886e38)
"""The smallest finite float32."""
_MARGIN = tl.constexpr(1e-5)
"""Relative error of float32 sums that only bound a threshold."""
_WAYS = tl.constexpr(8)
"""Number of pivots of one pass of the search: the interval shrinks ninefold."""
_WHOLE_PASSES = tl.constexpr(3)
"""Number of passes over a whole row before the rest is listed: 9**3 parts of 150,000 tokens."""


@triton.jit
def _key(value):
    """Returns signed integers in the order of the floats; both zeros have one key."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def bound_of(chunk_peaks, row, peak, mass, k, p, least, by_k, vocab, CHUNKS: tl.constexpr):
    """Returns a value that no kept token is below. The k-th largest of some of the logits is not above the k-th largest
    of all; likewise for masses. And what all tokens could weigh together, if they lay at a value."""
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
def append(values, tokens, number, capacity, value, token, found, WITH_TOKENS: tl.constexpr):
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
def _narrow(source, count, divisor, peak, low, high, limit, most, BY_COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Narrows the keys from `low` to below `high` to the part with the largest key below which the values weigh at most
    `limit`: their number, or the sum of their exponentials. Values below the first `low` weigh nothing. Ends with one
    key, or after `most` passes; returns the two ends and the weight below the lower one."""
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
    source, count, divisor, peak, lowest, limit, spare, SPARE: tl.constexpr, BY_COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """Returns the largest key, from `lowest` on, below which the values weigh at most `limit`. A source longer than
    `SPARE` is narrowed until what is left fits in `spare`, and then left alone."""
    low, high = lowest.to(tl.int64), _key(peak).to(tl.int64) + 1
    if count > SPARE:
        passes = tl.where(_value(lowest) == _LEAST, _WHOLE_PASSES + 2, _WHOLE_PASSES)
        low, high, passed = _narrow(source, count, divisor, peak, low, high, limit, passes, BY_COUNT, BLOCK)
        number = 0
        divided = divisor + tl.zeros((BLOCK,), tl.float32)
        tl.debug_barrier()  # `spare` may still be read for the search before
        for start in range(0, count, BLOCK):
            place = start + tl.arange(0, BLOCK)
            value = tl.load(source + place, mask=place < count, other=-_INFINITY)
            value = tl.div_rn(value, divided)
            key = _key(value)
            found = (key >= low.to(tl.int32)) & (key < high.to(tl.int32)) & (value > -_INFINITY)
            number = append(spare, spare, number, SPARE, value, value, found, False)
        tl.debug_barrier()
        if number <= SPARE:
            source, count, divisor = spare, number, 1.0
            limit -= passed
        else:
            low = lowest.to(tl.int64)
    low, high, passed = _narrow(source, count, divisor, peak, low, high, limit, _LAST, BY_COUNT, BLOCK)
    return low.to(tl.int32)


@triton.jit
def _mass_from(source, count, divisor, peak, lowest, BLOCK: tl.constexpr):
    """Returns the sum of the exponentials of values whose key is not below `lowest`."""
    divided = divisor + tl.zeros((BLOCK,), tl.float32)
    mass = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        value = tl.load(source + place, mask=place < count, other=-_INFINITY)
        value = tl.div_rn(value, divided)
        mass += tl.where(_key(value) >= lowest, tl.exp2((value - peak) * LOG2E), 0.0)
    return tl.sum(mass, axis=0)


@triton.jit
def threshold_of(
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
    """Returns the smallest value kept by top-k, top-p and min-p, each on what the one before left. `found` values are
    not below `bound`, and those below it weigh `tail`."""
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
            lowest = _search(source, count, divisor, peak, lowest, limit, spare, SPARE, False, BLOCK)
        if p <= 0.0:
            lowest = _key(peak)
    return tl.maximum(_value(lowest), _floor(peak, least))
