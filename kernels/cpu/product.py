"""Rows times a weight in panels of 64 outputs: the tile that every linear layer of a decode step is made of.

Knows panels and rows. Does not know layers. A panel holds 64 outputs for one input after another (float32) or for one
pair of inputs after another (bfloat16); that is also how oneDNN keeps a weight, so both read the same memory. An
output is one lane's sum over the inputs in their order: its bits do not depend on the rows or panels beside it.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit
from numba.core import types
from numba.extending import intrinsic

from kernels.cpu import lanes
from kernels.cpu.lanes import NUM, add_at, integer_at, load, store

FLOATS, WIDENED, PAIRED = 0, 1, 2
"""Weights and inputs of float32; weights of bfloat16 that are widened, inputs of float32; both of bfloat16, multiplied in
pairs by an instruction of the CPU's."""

PANEL = 64
_VECTORS = PANEL // NUM
_BYTES = 4 * PANEL
"""Of a panel, per float32 input or per pair of bfloat16 inputs."""
_AHEAD = 64
"""Inputs, or pairs of them, by which the weight is asked for before it is used."""


def _tile(rows: int, kind: int) -> Any:
    """Sums of `rows` rows and one panel: (panel, inputs, their stride in bytes, number of inputs or pairs, out, its
    stride in bytes). At most 6 rows: their sums, the weights and one input fill the 32 registers."""

    def tile(
        typing: Any, panel: Any, x: Any, x_stride: Any, num: Any, out: Any, stride: Any
    ) -> Any:
        return types.void(*[types.int64] * 6), build

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        panel, x, x_stride, num, out, stride = args
        integer = panel.type
        step_bytes = 8 if kind == WIDENED else 4
        x_rows = [builder.add(x, builder.mul(x_stride, integer(row))) for row in range(rows)]

        def step(place: ir.Value, sums: lanes.Vectors) -> lanes.Vectors:
            at = builder.add(panel, builder.mul(place, integer(_BYTES)))
            for line in range(_BYTES // 64):
                lanes.prefetch(builder, builder.add(at, integer(_AHEAD * _BYTES + 64 * line)))
            numbers = [builder.add(row, builder.mul(place, integer(step_bytes))) for row in x_rows]
            for weights, behind, spread, multiply in _steps(builder, at, kind):
                inputs = [spread(builder, builder.add(at, integer(behind))) for at in numbers]
                sums = [
                    [
                        multiply(builder, *pair)
                        for pair in zip(weights, [number] * _VECTORS, line, strict=True)
                    ]
                    for number, line in zip(inputs, sums, strict=True)
                ]
            return sums

        zeros = [[ir.Constant(lanes.VECTOR, [0.0] * NUM)] * _VECTORS for _ in range(rows)]
        for row, line in enumerate(lanes.loop(builder, num, zeros, step)):
            first = builder.add(out, builder.mul(stride, integer(row)))
            for v, sums in enumerate(line):
                at = builder.add(first, integer(64 * v))
                builder.store(sums, lanes.pointer(builder, at, lanes.VECTOR)).align = 4
        return context.get_dummy_value()

    return intrinsic(tile)


def _steps(builder: ir.IRBuilder, at: ir.Value, kind: int) -> list[Any]:
    """What is done with the panel's next 256 bytes: weights, where their input lies behind the first one, how it is
    spread over the lanes, how the two are multiplied."""
    places = [builder.add(at, at.type(64 * v)) for v in range(_VECTORS)]
    if kind == FLOATS:
        weights = [lanes.load_floats(builder, place) for place in places]
        return [(weights, 0, lanes.load_number, lanes.fused)]
    if kind == PAIRED:
        weights = [lanes.load_pairs(builder, place) for place in places]
        return [(weights, 0, lanes.load_word, lanes.pair_products)]
    words = [lanes.load_words(builder, place) for place in places]
    low, high = zip(*(lanes.both_widened(builder, word) for word in words), strict=True)
    return [(low, 0, lanes.load_number, lanes.fused), (high, 4, lanes.load_number, lanes.fused)]


_floats_1, _floats_2, _floats_3, _floats_4 = (_tile(rows, FLOATS) for rows in (1, 2, 3, 4))
_widened_1, _widened_2, _widened_3, _widened_4 = (_tile(rows, WIDENED) for rows in (1, 2, 3, 4))
_paired_1, _paired_2, _paired_3, _paired_4 = (_tile(rows, PAIRED) for rows in (1, 2, 3, 4))


@njit(nogil=True)
def panel_product(kind, panel, x, x_stride, num_inputs, out, stride, num_rows):
    """`out` `[num_rows, 64]` float32 = `x` `[num_rows, num_inputs]` times a panel; `out`'s rows are `stride` bytes
    apart, those of `x` `x_stride`."""
    num = num_inputs if kind == FLOATS else num_inputs // 2
    for row in range(0, num_rows, 4):
        left = num_rows - row
        rows = x + row * x_stride
        to = out + row * stride
        if kind == FLOATS:
            if left >= 4:
                _floats_4(panel, rows, x_stride, num, to, stride)
            elif left == 3:
                _floats_3(panel, rows, x_stride, num, to, stride)
            elif left == 2:
                _floats_2(panel, rows, x_stride, num, to, stride)
            else:
                _floats_1(panel, rows, x_stride, num, to, stride)
        elif kind == WIDENED:
            if left >= 4:
                _widened_4(panel, rows, x_stride, num, to, stride)
            elif left == 3:
                _widened_3(panel, rows, x_stride, num, to, stride)
            elif left == 2:
                _widened_2(panel, rows, x_stride, num, to, stride)
            else:
                _widened_1(panel, rows, x_stride, num, to, stride)
        elif left >= 4:
            _paired_4(panel, rows, x_stride, num, to, stride)
        elif left == 3:
            _paired_3(panel, rows, x_stride, num, to, stride)
        elif left == 2:
            _paired_2(panel, rows, x_stride, num, to, stride)
        else:
            _paired_1(panel, rows, x_stride, num, to, stride)


@njit(nogil=True)
def add_bias(out, stride, num_rows, bias):
    """Of a panel: 64 float32."""
    for row in range(num_rows):
        for at in range(0, 256, 64):
            to = out + row * stride + at
            store(to, load(to) + load(bias + at))


PRODUCT = (
    "rows",
    "kind",
    "x",
    "x_stride",
    "inputs",
    "panels",
    "weight",
    "out",
    "out_stride",
    "counters",
)
"""Words of a call, int64; strides in bytes; `counters` `[2, 8]`, zeros."""
(
    _ROWS, _KIND, _X, _X_STRIDE, _INPUTS, _PANELS, _WEIGHT, _OUT, _OUT_STRIDE, _COUNTERS,
) = range(0, 8 * len(PRODUCT), 8)  # fmt: skip


@njit(nogil=True)
def multiply(job):
    """What a thread does."""
    counter, kind = integer_at(job + _COUNTERS), integer_at(job + _KIND)
    inputs = integer_at(job + _INPUTS)
    panel_bytes = inputs * (256 if kind == FLOATS else 128)
    piece = add_at(counter, 1)
    while piece < integer_at(job + _PANELS):
        panel_product(
            kind, integer_at(job + _WEIGHT) + piece * panel_bytes, integer_at(job + _X), integer_at(job + _X_STRIDE),
            inputs, integer_at(job + _OUT) + 256 * piece, integer_at(job + _OUT_STRIDE), integer_at(job + _ROWS),
        )  # fmt: skip
        piece = add_at(counter, 1)
