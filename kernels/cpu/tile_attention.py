"""Attention of a part over paged KV in bfloat16, in the CPU's matrix unit.

It knows addresses of blocks and of a part's queries. It does not know rows or layers. A lane is one query head of one
line. Sixteen lanes are computed together: keys are the unit's first operand as they lie in their blocks, so scores come
out with a key to a row and a lane to a column, and softmax needs no sum across lanes. Chunks of fixed positions follow
each other with a running softmax (FlashAttention, arXiv 2205.14135). A key that a lane does not see counts as a weight
of exactly zero, so a lane's bits depend on its own query and keys only.
"""

from __future__ import annotations

import math

from llvmlite import ir
from numba import njit
from numba.core import types

from kernels.cpu import emit
from kernels.cpu.emit import HALVES, INT64, NUM, WORDS, intrinsic
from kernels.cpu.lanes import (
    fma,
    integer_at,
    larger,
    load,
    load_bf16,
    power_of_two,
    put_number,
    rounded,
    spread,
    store,
    store_bf16,
    store_pairs,
    where_below,
)
from kernels.cpu.tiles import INPUTS, TILE_BYTES, TILE_ROWS, scores, shape, sums

CHUNK = 128
_LOG2_E = math.log2(math.e)
_LEAST = -1e30
"""The largest score of lanes that have seen no key yet: a number, so that differences to it are numbers."""


def fits(head_dim: int, block_size: int) -> bool:
    """Returns whether keys of a block fill whole tiles."""
    return head_dim % INPUTS == 0 and block_size % TILE_ROWS == 0


def scratch_bytes(lanes: int, head_dim: int) -> int:
    """Returns the bytes that `attend_tiles` works in, for at most so many lanes."""
    tiles = -(-lanes // NUM)
    of_tiles = tiles * (NUM * 4 * head_dim + 6 * head_dim * NUM + 256)
    return of_tiles + CHUNK * (64 + 32 + 2 * head_dim) + max(TILE_BYTES, INPUTS * 2 * head_dim)


def _turned(builder: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """Returns 16 vectors of 32 bits with rows and columns exchanged: blocks of 1, 2, 4 and 8 are exchanged in turn."""
    size = 1
    while size < NUM:
        low = [n if n & size == 0 else NUM + n - size for n in range(NUM)]
        high = [n + size if n & size == 0 else NUM + n for n in range(NUM)]
        new = list(rows)
        for n in range(NUM):
            if n & size == 0:
                new[n] = emit.shuffled(builder, rows[n], rows[n + size], low)
                new[n + size] = emit.shuffled(builder, rows[n], rows[n + size], high)
        rows, size = new, 2 * size
    return rows


def _store_rows(builder: ir.IRBuilder, out: ir.Value, stride: ir.Value, rows: list[ir.Value]) -> None:
    for n, row in enumerate(rows):
        at = builder.add(out, builder.mul(stride, INT64(n)))
        builder.store(row, emit.pointer(builder, at, WORDS)).align = 4


@intrinsic(types.void, *[types.int64] * 4)
def _turn(builder: ir.IRBuilder, x: ir.Value, x_stride: ir.Value, out: ir.Value, stride: ir.Value) -> None:
    """Exchanges rows and columns of 16 by 16 numbers of 32 bits."""
    places = [builder.add(x, builder.mul(x_stride, INT64(n))) for n in range(NUM)]
    rows = [emit.load_words(builder, place) for place in places]
    _store_rows(builder, out, stride, _turned(builder, rows))


@intrinsic(types.void, *[types.int64] * 4)
def _turn_values(builder: ir.IRBuilder, first: ir.Value, second: ir.Value, stride: ir.Value, out: ir.Value) -> None:
    """Writes 16 columns of bfloat16 of 16 first and 16 second tokens as a tile with a column to a row."""

    def row(start: ir.Value, token: int) -> ir.Value:
        at = builder.add(start, builder.mul(stride, INT64(token)))
        return builder.zext(emit.load_vector(builder, at, HALVES, 2), WORDS)

    half = ir.Constant(WORDS, [16] * NUM)
    pairs = [
        builder.or_(row(start, token), builder.shl(row(start, token + 1), half))
        for start in (first, second)
        for token in range(0, NUM, 2)
    ]
    _store_rows(builder, out, INT64(64), _turned(builder, pairs))


@njit(nogil=True)
def _power(x):
    """Returns 2 to the x for x up to 0, to 3 units in the sixth place, which is more than a weight in bfloat16 keeps; 0
    below -126."""
    bounded = larger(x, spread(-126.0))
    whole = rounded(bounded)
    rest = bounded - whole
    sum = spread(1.3333558e-3)
    sum = fma(sum, rest, spread(9.6181291e-3))
    sum = fma(sum, rest, spread(5.5504109e-2))
    sum = fma(sum, rest, spread(2.4022651e-1))
    sum = fma(sum, rest, spread(6.9314718e-1))
    sum = fma(sum, rest, spread(1.0))
    return where_below(x, spread(-126.0), spread(0.0), sum * power_of_two(whole))


@njit(nogil=True)
def _areas(scratch, lanes, head_dim):
    """Returns addresses: queries in float32 `[lanes, head_dim]`, tiles of lanes, scores of a chunk `[keys, 16]`, their
    weights in pairs of keys, values with a column to a row, and tokens of a tile that is not read in place."""
    tiles = (lanes + NUM - 1) // NUM
    of_tiles = scratch + tiles * NUM * 4 * head_dim
    of_scores = of_tiles + tiles * _tile_bytes(head_dim)
    of_weights = of_scores + CHUNK * 64
    of_values = of_weights + CHUNK * 32
    return of_tiles, of_scores, of_weights, of_values, of_values + CHUNK * 2 * head_dim


@njit(nogil=True)
def _tile_bytes(head_dim):
    """Returns the bytes of a tile of lanes: queries, sums `[head_dim, 16]`, largest scores, sums of weights, and the
    first and the end of the keys that each lane sees."""
    return 6 * head_dim * NUM + 256


@njit(nogil=True)
def query_at(scratch, lane, head_dim):
    """Returns the address at which the caller writes a lane's query, float32, multiplied by `query_scale`."""
    return scratch + lane * 4 * head_dim


@njit(nogil=True)
def query_scale(scale):
    """Returns the factor of queries, for weights that are powers of two."""
    return scale * _LOG2_E


@njit(nogil=True)
def see(scratch, lanes, lane, head_dim, first, end):
    """Sets the keys that a lane sees, `end` exclusive."""
    tile = _areas(scratch, lanes, head_dim)[0] + lane // NUM * _tile_bytes(head_dim)
    at = tile + 6 * head_dim * NUM + 128 + lane % NUM * 4
    put_number(at, first)
    put_number(at + 64, end)


@njit(nogil=True)
def attend_tiles(lanes, head_dim, keys, block_bytes, half_bytes, table, block_size, first, length, scratch):
    """Computes attention of lanes whose queries and keys to see are set. `keys` is the address of the KV head's keys in
    block 0; those of another block are `block_bytes` times its id further, and values are `half_bytes` after their
    keys. `table` has the int64 ids of the row's blocks. No lane sees keys before `first`, or from `length` on. What
    comes out takes the queries' place, and is float32."""
    tiles, of_scores, of_weights, of_values, spare = _areas(scratch, lanes, head_dim)
    size, end = _tile_bytes(head_dim), (lanes + NUM - 1) // NUM
    shape(TILE_ROWS, TILE_ROWS)
    for tile in range(end):
        _begin(scratch + tile * NUM * 4 * head_dim, tiles + tile * size, head_dim)
    start = first // CHUNK * CHUNK
    while start < length:
        num = min(length - start, CHUNK)
        steps = (num + INPUTS - 1) // INPUTS
        _stage(
            keys, block_bytes, half_bytes, table, block_size, head_dim, start, steps, first, length, spare, of_values
        )
        for number in range(end):
            tile = tiles + number * size
            for key in range(0, num, TILE_ROWS):
                at = _token(keys, block_bytes, table, block_size, head_dim, start + key)
                scores(head_dim // INPUTS, at, 2 * head_dim, tile, of_scores + 64 * key)
            _weigh(tile, head_dim, of_scores, of_weights, start, num, steps)
            for column in range(0, head_dim, TILE_ROWS):
                to = spare
                sums(steps, of_values + column * 2 * CHUNK, of_weights, to)
                _add(tile + 2 * head_dim * NUM + 64 * column, to)
        start += CHUNK
    for tile in range(end):
        _end(tiles + tile * size, scratch + tile * NUM * 4 * head_dim, head_dim)


@njit(nogil=True)
def _token(keys, block_bytes, table, block_size, head_dim, place):
    block = keys + integer_at(table + 8 * (place // block_size)) * block_bytes
    return block + place % block_size * 2 * head_dim


@njit(nogil=True)
def _begin(queries, tile, head_dim):
    """Brings queries into the order of the unit's second operand, and clears sums."""
    sums_at = tile + 2 * head_dim * NUM
    for lane in range(NUM):
        for at in range(0, head_dim, NUM):
            store_bf16(sums_at + 2 * (lane * head_dim + at), load(queries + 4 * (lane * head_dim + at)))
    for at in range(0, head_dim, INPUTS):
        _turn(sums_at + 2 * at, 2 * head_dim, tile + TILE_BYTES * (at // INPUTS), 64)
    for column in range(head_dim):
        store(sums_at + 64 * column, spread(0.0))
    store(tile + 6 * head_dim * NUM, spread(_LEAST))
    store(tile + 6 * head_dim * NUM + 64, spread(0.0))


@njit(nogil=True)
def _stage(keys, block_bytes, half_bytes, table, block_size, head_dim, start, steps, first, length, spare, of_values):
    """Writes the values of a chunk with a column to a row. Tokens that nobody sees are zeros: they were perhaps never
    written."""
    for step in range(steps):
        place = start + step * INPUTS
        if first <= place and place + INPUTS <= length:
            low = half_bytes + _token(keys, block_bytes, table, block_size, head_dim, place)
            high = half_bytes + _token(keys, block_bytes, table, block_size, head_dim, place + TILE_ROWS)
        else:
            low, high = spare, spare + TILE_ROWS * 2 * head_dim
            for token in range(INPUTS):
                to, is_seen = spare + token * 2 * head_dim, first <= place + token < length
                x = to
                if is_seen:
                    x = half_bytes + _token(keys, block_bytes, table, block_size, head_dim, place + token)
                for at in range(0, head_dim, NUM):
                    store_bf16(to + 2 * at, load_bf16(x + 2 * at) if is_seen else spread(0.0))
        for column in range(0, head_dim, TILE_ROWS):
            to = of_values + column * 2 * CHUNK + step * TILE_BYTES
            _turn_values(low + 2 * column, high + 2 * column, 2 * head_dim, to)


@njit(nogil=True)
def _weigh(tile, head_dim, of_scores, of_weights, start, num, steps):
    """Turns a chunk's scores into weights, in pairs of keys, and scales earlier sums to the new largest score."""
    tops = tile + 6 * head_dim * NUM
    first, end = load(tops + 128), load(tops + 192)
    before = load(tops)
    now = before
    for key in range(num):
        at, place = of_scores + 64 * key, spread(start + key)
        seen = where_below(place, first, spread(-math.inf), where_below(place, end, load(at), spread(-math.inf)))
        store(at, seen)
        now = larger(seen, now)
    for key in range(num, steps * INPUTS):
        store(of_scores + 64 * key, spread(-math.inf))
    new = spread(0.0)
    for key in range(0, steps * INPUTS, 2):
        at = of_scores + 64 * key
        low, high = _power(load(at) - now), _power(load(at + 64) - now)
        new = new + low
        new = new + high
        store_pairs(of_weights + 32 * key, low, high)
    kept = _power(before - now)
    for column in range(head_dim):
        at = tile + 2 * head_dim * NUM + 64 * column
        store(at, load(at) * kept)
    store(tops, now)
    store(tops + 64, load(tops + 64) * kept + new)


@njit(nogil=True)
def _add(to, x):
    for row in range(0, 64 * TILE_ROWS, 64):
        store(to + row, load(to + row) + load(x + row))


@njit(nogil=True)
def _end(tile, out, head_dim):
    """Writes the sums `[head_dim, 16]`, divided by those of weights, as `[16, head_dim]`."""
    sums_at = tile + 2 * head_dim * NUM
    share = spread(1.0) / load(tile + 6 * head_dim * NUM + 64)
    for column in range(head_dim):
        store(sums_at + 64 * column, load(sums_at + 64 * column) * share)
    for column in range(0, head_dim, NUM):
        _turn(sums_at + 64 * column, 64, out + 4 * column, 4 * head_dim)
