"""Products of rows with a weight in panels of 32 outputs: every linear layer of a decode step consists of these tiles.

It knows panels and rows. It does not know layers. A panel holds 32 outputs for one input after another (float32) or for
one pair of inputs after another (bfloat16), and is read from its first byte to its last, so that a core prefetches what
it needs next. An output is one lane's sum over the inputs in their order: its bits do not depend on other rows or
panels.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from llvmlite import ir
from numba import njit
from numba.core import types

from kernels.cpu import emit
from kernels.cpu.emit import NUM, intrinsic
from kernels.cpu.lanes import add_at, integer_at, load, store
from kernels.cpu.team import LINE, take
from kernels.cpu.tiles import release, tile_product

FLOATS, WIDENED, PAIRED, TILED = 0, 1, 2, 3
"""Kinds of products: weights and inputs in float32; weights in bfloat16 that are widened, inputs in float32; both in
bfloat16, multiplied in pairs by an instruction of the CPU, or in its matrix unit."""

PANEL = 32
PANEL_BYTES = 4 * PANEL
"""Bytes of a panel per float32 input or per pair of bfloat16 inputs; also the bytes of a row's outputs."""
_VECTORS = PANEL // NUM
_FEW_ROWS, _ROWS = 4, 8
"""Rows of a tile. Each number of rows up to the first value has its own tile; more rows share one that fills half of
the 32 registers."""
_AHEAD = 64
"""Distance, in inputs or pairs of them, by which the weight is prefetched before it is used."""
_MOST_FREE = 8
"""Number of multiplications that take no longer than reading 128 bytes: with no more of them the core's own prefetching
is better than explicit prefetches."""


@intrinsic(types.void, *[types.int64] * 8)
def _tile(builder: ir.IRBuilder, kind: ir.Value, rows: ir.Value, *rest: ir.Value) -> None:
    """Computes the products of up to `_ROWS` rows and a panel, as `_emit` takes them."""
    integer = rows.type
    last = builder.sub(rows, integer(1))

    def of_kind(number: int) -> None:
        tiles = {
            n: partial(_emit, builder, number, [integer(row) for row in range(n)], *rest)
            for n in range(1, _FEW_ROWS + 1)
        }
        # The last row is used for the missing ones.
        some = [_smaller(builder, integer(row), last) for row in range(_ROWS)]
        tiles[_ROWS] = partial(_emit, builder, number, some, *rest)
        emit.choose(builder, rows, tiles)

    emit.choose(builder, kind, {number: partial(of_kind, number) for number in (FLOATS, WIDENED, PAIRED)})


def _smaller(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.select(builder.icmp_signed("<", a, b), a, b)


def _emit(
    builder: ir.IRBuilder,
    kind: int,
    rows: list[ir.Value],
    panel: ir.Value,
    x: ir.Value,
    x_stride: ir.Value,
    num: ir.Value,
    out: ir.Value,
    stride: ir.Value,
) -> None:
    """`num` is the number of inputs, or of pairs of them."""
    integer = panel.type
    step_bytes = 8 if kind == WIDENED else 4
    x_rows = [builder.add(x, builder.mul(x_stride, row)) for row in rows]
    multiplications = len(rows) * _VECTORS * (2 if kind == WIDENED else 1)

    def step(place: ir.Value, sums: emit.Vectors) -> emit.Vectors:
        at = builder.add(panel, builder.mul(place, integer(PANEL_BYTES)))
        for line in range(_VECTORS if multiplications > _MOST_FREE else 0):
            emit.prefetch(builder, builder.add(at, integer(_AHEAD * PANEL_BYTES + 64 * line)))
        numbers = [builder.add(row, builder.mul(place, integer(step_bytes))) for row in x_rows]
        for weights, behind, spread, multiply in _steps(builder, at, kind):
            inputs = [spread(builder, builder.add(at, integer(behind))) for at in numbers]
            sums = [
                [multiply(builder, w, number, old) for w, old in zip(weights, line, strict=True)]
                for number, line in zip(inputs, sums, strict=True)
            ]
        return sums

    zeros = [[ir.Constant(emit.VECTOR, [0.0] * NUM)] * _VECTORS for _ in rows]
    for row, line in zip(rows, emit.loop(builder, num, zeros, step), strict=True):
        first = builder.add(out, builder.mul(stride, row))
        for v, found in enumerate(line):
            at = builder.add(first, integer(64 * v))
            builder.store(found, emit.pointer(builder, at, emit.VECTOR)).align = 4


def _steps(builder: ir.IRBuilder, at: ir.Value, kind: int) -> list[Any]:
    """Returns the operations on the panel's next `PANEL_BYTES`: the weights, the offset in bytes of their input, the
    function that repeats the input over the lanes, and the function that multiplies the two."""
    places = [builder.add(at, at.type(64 * v)) for v in range(_VECTORS)]
    if kind == FLOATS:
        weights = [emit.load_floats(builder, place) for place in places]
        return [(weights, 0, emit.load_number, emit.fused)]
    if kind == PAIRED:
        weights = [emit.load_pairs(builder, place) for place in places]
        return [(weights, 0, emit.load_word, emit.pair_products)]
    words = [emit.load_words(builder, place) for place in places]
    low, high = zip(*(emit.both_widened(builder, word) for word in words), strict=True)
    return [(low, 0, emit.load_number, emit.fused), (high, 4, emit.load_number, emit.fused)]


@njit(nogil=True)
def takes_pairs(kind):
    """Returns whether inputs are bfloat16."""
    return kind >= PAIRED


@njit(nogil=True)
def panel_bytes(kind, num_inputs):
    return num_inputs * (PANEL_BYTES if kind == FLOATS else PANEL_BYTES // 2)


@njit(nogil=True)
def panel_product(kind, panel, x, x_stride, num_inputs, out, stride, num_rows):
    """Computes `out` `[num_rows, PANEL]` float32 = `x` `[num_rows, num_inputs]` times a panel; `out`'s rows are
    `stride` bytes apart, those of `x` `x_stride`."""
    if kind == TILED:
        tile_product(panel, x, 16 * x_stride, 64, x_stride, num_inputs, out, stride, num_rows)
        return
    num = num_inputs if kind == FLOATS else num_inputs // 2
    for row in range(0, num_rows, _ROWS):
        some = min(num_rows - row, _ROWS)
        _tile(kind, some, panel, x + row * x_stride, x_stride, num, out + row * stride, stride)


@njit(nogil=True)
def add_bias(out, stride, num_rows, bias):
    """Adds a panel's bias, `PANEL` float32 numbers."""
    for row in range(num_rows):
        for at in range(0, PANEL_BYTES, 64):
            to = out + row * stride + at
            store(to, load(to) + load(bias + at))


PRODUCT = ("rows", "kind", "x", "x_stride", "inputs", "panels", "weight", "out", "out_stride", "threads", "counters")
"""Words of a call, int64; strides are in bytes; `counters` holds one counter of threads, then those of a stage
(`team`), all zeros at first."""
(_NUM_ROWS, _KIND, _X, _X_STRIDE, _INPUTS, _PANELS, _WEIGHT, _OUT, _OUT_STRIDE, _THREADS, _COUNTERS) = range(
    0, 8 * len(PRODUCT), 8
)


@njit(nogil=True)
def multiply(job):
    """Does the work of one thread: it multiplies panels until none is left."""
    counters, kind = integer_at(job + _COUNTERS), integer_at(job + _KIND)
    threads, pieces = integer_at(job + _THREADS), integer_at(job + _PANELS)
    inputs = integer_at(job + _INPUTS)
    size = panel_bytes(kind, inputs)
    thread, stage = add_at(counters, 1), counters + LINE
    piece = take(stage, thread, threads, pieces)
    while piece < pieces:
        panel_product(
            kind,
            integer_at(job + _WEIGHT) + piece * size,
            integer_at(job + _X),
            integer_at(job + _X_STRIDE),
            inputs,
            integer_at(job + _OUT) + PANEL_BYTES * piece,
            integer_at(job + _OUT_STRIDE),
            integer_at(job + _NUM_ROWS),
        )
        piece = take(stage, thread, threads, pieces)
    if kind == TILED:
        release()
