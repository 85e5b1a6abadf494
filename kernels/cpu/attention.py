"""Attention of one token over paged KV, read in place: the query heads of one KV head together.

It knows addresses of blocks. It does not know rows or layers. For each chunk of fixed positions it computes scores,
their weights, and the weighted sum of values; chunks follow each other with a running softmax (FlashAttention, arXiv
2205.14135). Everything is in float32, in an order that depends on the row's own length only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from llvmlite import ir
from numba import njit
from numba.core import types

from kernels.cpu import emit
from kernels.cpu.emit import NUM, intrinsic
from kernels.cpu.lanes import (
    ask,
    first_of,
    integer_at,
    larger,
    largest,
    load,
    number_at,
    put_number,
    spread,
    store,
    total,
)
from kernels.cpu.pointwise import capped, exp_lanes

CHUNK = 512
_ROOM = CHUNK + NUM
"""Number of floats for the scores of one head, and for what is written after the last one."""
_HEADS = 3
_KEYS = 4
_SLICE = 4
"""Number of vectors of a value that are summed at a time."""


def scratch_floats(groups: int) -> int:
    """Returns the float32 numbers that `attend` works in: scores, sums, largest scores and sums of weights."""
    return groups * (_ROOM + 2)


@intrinsic(types.void, *[types.int64] * 10)
def _scores(builder: ir.IRBuilder, *values: ir.Value) -> None:
    """Computes products of up to `_HEADS` queries and 4 keys, `depth` vectors deep; strides are in bytes. If there are
    fewer keys, the last one is used for the missing ones."""
    _by_heads(builder, _emit_scores, values)


def _by_heads(builder: ir.IRBuilder, body: Callable[..., None], args: Sequence[ir.Value]) -> None:
    """Emits the body for KV in bfloat16 or float32, and for each number of heads."""
    narrow, heads, *rest = args

    def of_dtype(number: int) -> None:
        bodies = {n: partial(body, builder, bool(number), n, *rest) for n in range(1, _HEADS + 1)}
        emit.choose(builder, heads, bodies)

    emit.choose(builder, narrow, {number: partial(of_dtype, number) for number in (0, 1)})


def _emit_scores(
    builder: ir.IRBuilder,
    narrow: bool,
    heads: int,
    q: ir.Value,
    q_stride: ir.Value,
    k: ir.Value,
    k_stride: ir.Value,
    num: ir.Value,
    depth: ir.Value,
    out: ir.Value,
    stride: ir.Value,
) -> None:
    integer = q.type
    last = builder.sub(num, integer(1))
    keys = []
    for key in range(_KEYS):
        inside = builder.icmp_signed("<", integer(key), last)
        place = builder.select(inside, integer(key), last)
        keys.append(builder.add(k, builder.mul(place, k_stride)))
    queries = [builder.add(q, builder.mul(q_stride, integer(head))) for head in range(heads)]

    def step(place: ir.Value, sums: emit.Vectors) -> emit.Vectors:
        q_at = builder.mul(place, integer(64))
        k_at = builder.mul(place, integer(32 if narrow else 64))
        fetch = emit.load_widened if narrow else emit.load_floats
        found = [fetch(builder, builder.add(key, k_at)) for key in keys]
        new = []
        for head in range(heads):
            query = emit.load_floats(builder, builder.add(queries[head], q_at))
            pairs = zip(found, sums[head], strict=True)
            new.append([emit.fused(builder, query, key, old) for key, old in pairs])
        return new

    zeros = [[ir.Constant(emit.VECTOR, [0.0] * NUM)] * _KEYS for _ in range(heads)]
    four = ir.VectorType(ir.FloatType(), _KEYS)
    for head, sums in enumerate(emit.loop(builder, depth, zeros, step)):
        at = builder.add(out, builder.mul(stride, integer(head)))
        found = _four_totals(builder, sums)
        builder.store(found, emit.pointer(builder, at, four)).align = 4


def _four_totals(builder: ir.IRBuilder, sums: list[ir.Value]) -> ir.Value:
    """Returns the sum of each vector's lanes: halves are added, then quarters, then neighbours."""

    def both(a: ir.Value, b: ir.Value, first: list[int], second: list[int]) -> ir.Value:
        low, high = (emit.shuffled(builder, a, b, mask) for mask in (first, second))
        return builder.fadd(low, high)

    low = [*range(8), *range(16, 24)]
    high = [place + 8 for place in low]
    ab, cd = both(sums[0], sums[1], low, high), both(sums[2], sums[3], low, high)
    low = [place for start in (0, 8, 16, 24) for place in range(start, start + 4)]
    x = both(ab, cd, low, [place + 4 for place in low])
    same = list(range(NUM))
    x = both(x, x, same, [place ^ 2 for place in same])
    x = both(x, x, same, [place ^ 1 for place in same])
    return emit.shuffled(builder, x, x, [0, 4, 8, 12])


@intrinsic(types.void, *[types.int64] * 10)
def _sums(builder: ir.IRBuilder, *values: ir.Value) -> None:
    """Adds weight times value of some tokens to the sums of up to `_HEADS` heads, `depth` vectors wide, at most 4."""
    _by_heads(builder, _emit_sums, values)


def _emit_sums(
    builder: ir.IRBuilder,
    narrow: bool,
    heads: int,
    w: ir.Value,
    w_stride: ir.Value,
    v: ir.Value,
    v_stride: ir.Value,
    num: ir.Value,
    depth: ir.Value,
    sums: ir.Value,
    stride: ir.Value,
) -> None:
    integer = w.type
    fetch, size = (emit.load_widened, 32) if narrow else (emit.load_floats, 64)
    lines = [builder.add(sums, builder.mul(stride, integer(head))) for head in range(heads)]
    weights = [builder.add(w, builder.mul(w_stride, integer(head))) for head in range(heads)]

    def of_width(vectors: int) -> None:
        places = [[builder.add(line, integer(64 * vector)) for vector in range(vectors)] for line in lines]

        def step(token: ir.Value, sums: emit.Vectors) -> emit.Vectors:
            at = builder.add(v, builder.mul(token, v_stride))
            values = [fetch(builder, builder.add(at, integer(size * n))) for n in range(vectors)]
            new = []
            for head in range(heads):
                place = builder.add(weights[head], builder.mul(token, integer(4)))
                weight = emit.load_number(builder, place)
                pairs = zip(values, sums[head], strict=True)
                new.append([emit.fused(builder, weight, value, old) for value, old in pairs])
            return new

        old = [[emit.load_floats(builder, place) for place in line] for line in places]
        for line, found in zip(places, emit.loop(builder, num, old, step), strict=True):
            for place, value in zip(line, found, strict=True):
                builder.store(value, emit.pointer(builder, place, emit.VECTOR)).align = 4

    emit.choose(builder, depth, {n: partial(of_width, n) for n in range(1, _SLICE + 1)})


@njit(nogil=True)
def _run_scores(narrow, heads, q, q_stride, k, k_stride, num, depth, out, stride):
    for head in range(0, heads, _HEADS):
        queries, to = q + head * q_stride, out + head * stride
        for key in range(0, num, _KEYS):
            some = min(_KEYS, num - key)
            keys, place = k + key * k_stride, to + 4 * key
            _scores(narrow, heads - head, queries, q_stride, keys, k_stride, some, depth, place, stride)


@njit(nogil=True)
def _run_sums(narrow, heads, w, w_stride, v, v_stride, num, depth, sums, stride):
    size = 32 if narrow else 64
    for head in range(0, heads, _HEADS):
        weights, line = w + head * w_stride, sums + head * stride
        for vector in range(0, depth, _SLICE):
            values, to = v + vector * size, line + 64 * vector
            _sums(narrow, heads - head, weights, w_stride, values, v_stride, num, depth - vector, to, stride)


@njit(nogil=True)
def attend(
    narrow,
    out,
    query,
    heads,
    head_dim,
    keys,
    block_bytes,
    half_bytes,
    table,
    block_size,
    first,
    length,
    softcap,
    scratch,
):
    """Computes attention of one token. `out` and `query` are float32 `[heads, head_dim]`, the query scaled. `keys` is
    the address of the KV head's keys in block 0; those of another block are `block_bytes` times its id further, and
    values are `half_bytes` after their keys. `table` has the int64 ids of the row's blocks. Tokens from `first` to
    `length`, exclusive, are seen. A `softcap` above 0 bounds scores."""
    depth = head_dim // 16
    token_bytes = head_dim * (2 if narrow else 4)
    line, stride = 4 * _ROOM, 4 * head_dim
    tops, weights = scratch + heads * line, scratch + heads * (line + 4)
    for head in range(heads):
        put_number(tops + 4 * head, -math.inf)
        put_number(weights + 4 * head, 0.0)
        for vector in range(depth):
            store(out + head * stride + vector * 64, spread(0.0))
    start = first
    while start < length:
        end = min(length, (start // CHUNK + 1) * CHUNK)
        place = start
        while place < end:
            offset = place % block_size
            num = min(block_size - offset, end - place)
            block = keys + integer_at(table + 8 * (place // block_size)) * block_bytes
            for at in range(offset * token_bytes, (offset + num) * token_bytes, 64):
                ask(block + half_bytes + at)
            if place + num < length:
                following = integer_at(table + 8 * ((place + num) // block_size)) * block_bytes
                for at in range(0, min(block_size, length - place - num) * token_bytes, 64):
                    ask(keys + following + at)
            _run_scores(
                narrow,
                heads,
                query,
                stride,
                block + offset * token_bytes,
                token_bytes,
                num,
                depth,
                scratch + 4 * (place - start),
                line,
            )
            place += num
        num = end - start
        for head in range(heads):
            if softcap > 0.0:
                for at in range(scratch + head * line, scratch + head * line + 4 * num, 64):
                    store(at, capped(load(at), softcap))
            _weigh(scratch + head * line, num, tops + 4 * head, weights + 4 * head, out + head * stride, depth)
        place = start
        while place < end:
            offset = place % block_size
            num = min(block_size - offset, end - place)
            block = keys + half_bytes + integer_at(table + 8 * (place // block_size)) * block_bytes
            _run_sums(
                narrow,
                heads,
                scratch + 4 * (place - start),
                line,
                block + offset * token_bytes,
                token_bytes,
                num,
                depth,
                out,
                stride,
            )
            place += num
        start = end
    for head in range(heads if length > first else 0):
        share = spread(1.0 / number_at(weights + 4 * head))
        for vector in range(depth):
            at = out + head * stride + vector * 64
            store(at, load(at) * share)


@njit(nogil=True)
def _weigh(scores, num, top, weight, sums, depth):
    """Turns the scores of a chunk into weights, and scales earlier sums to the new largest score."""
    for place in range(num, (num + 15) // 16 * 16):
        put_number(scores + 4 * place, -math.inf)
    best = spread(-math.inf)
    for place in range(0, num, 16):
        best = larger(best, load(scores + 4 * place))
    before = number_at(top)
    now = max(before, largest(best))
    new = spread(0.0)
    for place in range(0, num, 16):
        share = exp_lanes(load(scores + 4 * place) - spread(now))
        store(scores + 4 * place, share)
        new = new + share
    kept = exp_lanes(spread(before - now))
    for vector in range(depth):
        at = sums + 64 * vector
        store(at, load(at) * kept)
    put_number(top, now)
    put_number(weight, number_at(weight) * first_of(kept) + total(new))
