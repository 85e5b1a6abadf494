"""Products of rows with a panel in the CPU's matrix unit (Intel's AMX): 16 rows by 32 inputs at an instruction.

It knows panels and rows. It does not know layers. A panel of bfloat16 pairs (`product`) is, read with a stride, what
the unit takes as its second operand, so the same weight serves both. An output is one chain of sums over the inputs in
their order, 32 at a time: its bits do not depend on other rows or panels.
"""

from __future__ import annotations

import ctypes
from functools import cache

from llvmlite import ir
from numba import njit
from numba.core import cgutils, types

from kernels.cpu import emit, instructions
from kernels.cpu.emit import intrinsic

INPUTS = 32
"""Number of inputs that one instruction takes."""
TILE_ROWS = 16
ROWS = 2 * TILE_ROWS
"""Number of rows whose sums for a panel stay in the unit's registers."""
_ROW_BYTES = 64
TILE_BYTES = TILE_ROWS * _ROW_BYTES
_PAIR_ROWS = 16
_SUMS, _INPUTS, _WEIGHTS = (0, 1, 2, 3), (4, 5), (6, 7)
"""Registers: sums of the first rows with both halves of a panel, then those of the second rows."""
_CONFIG_BYTES, _WIDTHS, _HEIGHTS = 64, 16, 48
"""Size of a configuration, and where it has the widths in bytes (16 bits each) and the heights of registers."""
_AHEAD = 8 * TILE_BYTES
"""Distance in bytes by which a panel is prefetched before it is used."""

_PERMISSION, _TILE_DATA, _SYSTEM_CALL = 0x1023, 18, 158
"""Linux gives the unit's registers to a process that asks: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)."""

_BYTE, _SHORT = ir.IntType(8), ir.IntType(16)


@cache
def are_there() -> bool:
    """Returns whether the CPU has the unit, no setting hides it, and the system lets this process use it. All threads may
    use it then."""
    if not (instructions.has("amx") and emit.has_tiles()):
        return False
    return bool(ctypes.CDLL(None).syscall(_SYSTEM_CALL, _PERMISSION, _TILE_DATA) == 0)


def _call(builder: ir.IRBuilder, name: str, *args: ir.Value) -> None:
    kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), args)


def _load(builder: ir.IRBuilder, tile: int, address: ir.Value, stride: ir.Value) -> None:
    _call(builder, "tileloadd64", _BYTE(tile), emit.pointer(builder, address, _BYTE), stride)


@intrinsic(types.void, types.int64, types.int64)
def shape(builder: ir.IRBuilder, first: ir.Value, second: ir.Value) -> None:
    """Configures the registers for so many first and second rows."""
    if not emit.has_tiles():
        return
    config = cgutils.alloca_once(builder, ir.ArrayType(_BYTE, _CONFIG_BYTES))
    start = builder.ptrtoint(config, emit.INT64)

    def put(offset: int, value: ir.Value) -> None:
        at = builder.add(start, emit.INT64(offset))
        builder.store(value, emit.pointer(builder, at, value.type)).align = 1

    for offset in range(0, _CONFIG_BYTES, 8):
        put(offset, emit.INT64(1 if offset == 0 else 0))  # the first byte names the layout
    one, two = (builder.trunc(rows, _BYTE) for rows in (first, second))
    heights = (one, one, two, two, one, two, _BYTE(_PAIR_ROWS), _BYTE(_PAIR_ROWS))
    for tile, height in enumerate(heights):
        # A register without rows has to have no width either.
        is_empty = builder.icmp_unsigned("==", height, _BYTE(0))
        put(_WIDTHS + 2 * tile, builder.select(is_empty, _SHORT(0), _SHORT(_ROW_BYTES)))
        put(_HEIGHTS + tile, height)
    _call(builder, "ldtilecfg", emit.pointer(builder, start, _BYTE))


@intrinsic(types.void)
def release(builder: ir.IRBuilder) -> None:
    """Gives the unit's registers back, so that a switch of threads does not save them."""
    if emit.has_tiles():
        _call(builder, "tilerelease")


@intrinsic(types.void, *[types.int64] * 9)
def _multiply(builder: ir.IRBuilder, two: ir.Value, *rest: ir.Value) -> None:
    """Computes the products of one or `two` tiles of rows and a panel, as `_emit` takes them."""
    if emit.has_tiles():
        emit.choose(builder, two, {0: lambda: _emit(builder, 1, *rest), 1: lambda: _emit(builder, 2, *rest)})


def _emit(
    builder: ir.IRBuilder,
    heights: int,
    panel: ir.Value,
    x: ir.Value,
    x_tile: ir.Value,
    x_step: ir.Value,
    x_stride: ir.Value,
    num: ir.Value,
    out: ir.Value,
    stride: ir.Value,
) -> None:
    """`num` is the number of inputs divided by `INPUTS`."""
    integer = panel.type
    pairs = [(row, half) for row in range(heights) for half in range(2)]
    for row, half in pairs:
        _call(builder, "tilezero", _BYTE(_SUMS[2 * row + half]))
    lines = [builder.add(x, builder.mul(x_tile, integer(row))) for row in range(heights)]

    def step(place: ir.Value, _: emit.Vectors) -> emit.Vectors:
        at = builder.add(panel, builder.mul(place, integer(2 * TILE_BYTES)))
        if heights == 1:
            for line in range(0, 2 * TILE_BYTES, _ROW_BYTES):
                emit.prefetch(builder, builder.add(at, integer(_AHEAD + line)))
        for half, tile in enumerate(_WEIGHTS):
            _load(builder, tile, builder.add(at, integer(TILE_BYTES * half)), integer(_ROW_BYTES))
        for row, line in enumerate(lines):
            _load(builder, _INPUTS[row], builder.add(line, builder.mul(place, x_step)), x_stride)
        for row, half in pairs:
            tiles = (_SUMS[2 * row + half], _INPUTS[row], _WEIGHTS[half])
            _call(builder, "tdpbf16ps", *(_BYTE(tile) for tile in tiles))
        return []

    emit.loop(builder, num, [], step)
    for row, half in pairs:
        at = builder.add(out, builder.mul(stride, integer(TILE_ROWS * row)))
        place = emit.pointer(builder, builder.add(at, integer(_ROW_BYTES * half)), _BYTE)
        _call(builder, "tilestored64", _BYTE(_SUMS[2 * row + half]), place, stride)


@njit(nogil=True)
def tile_product(panel, x, x_tile, x_step, x_stride, num_inputs, out, stride, num_rows):
    """Does the same as `product.panel_product` for inputs and weights in bfloat16. Input i of row r is `r // 16 *
    x_tile + i // 32 * x_step + r % 16 * x_stride + i % 32 * 2` bytes behind the first."""
    shaped = 0
    for row in range(0, num_rows, ROWS):
        some = min(num_rows - row, ROWS)
        if some != shaped:
            shape(min(some, TILE_ROWS), max(some - TILE_ROWS, 0))
            shaped = some
        is_two = 1 if some > TILE_ROWS else 0
        rows = x + row // TILE_ROWS * x_tile
        _multiply(is_two, panel, rows, x_tile, x_step, x_stride, num_inputs // INPUTS, out + row * stride, stride)


@intrinsic(types.void, *[types.int64] * 5)
def scores(
    builder: ir.IRBuilder, steps: ir.Value, keys: ir.Value, stride: ir.Value, queries: ir.Value, out: ir.Value
) -> None:
    """Writes products of 16 keys and 16 queries, `[16, 16]` float32. The queries are tiles, one behind the other. The
    registers have 16 rows."""
    _emit_tile(builder, steps, keys, _ROW_BYTES, stride, queries, out)


@intrinsic(types.void, *[types.int64] * 4)
def sums(builder: ir.IRBuilder, steps: ir.Value, values: ir.Value, weights: ir.Value, out: ir.Value) -> None:
    """Writes sums of 16 columns of values by the weights of 16 lanes, `[16, 16]` float32. Both are tiles, one behind
    the other. The registers have 16 rows."""
    _emit_tile(builder, steps, values, TILE_BYTES, steps.type(_ROW_BYTES), weights, out)


def _emit_tile(
    builder: ir.IRBuilder,
    steps: ir.Value,
    first: ir.Value,
    step_bytes: int,
    stride: ir.Value,
    second: ir.Value,
    out: ir.Value,
) -> None:
    if not emit.has_tiles():
        return
    integer, (total, left, right) = steps.type, (_SUMS[0], _INPUTS[0], _WEIGHTS[0])
    _call(builder, "tilezero", _BYTE(total))

    def step(place: ir.Value, _: emit.Vectors) -> emit.Vectors:
        _load(builder, left, builder.add(first, builder.mul(place, integer(step_bytes))), stride)
        _load(builder, right, builder.add(second, builder.mul(place, integer(TILE_BYTES))), integer(_ROW_BYTES))
        _call(builder, "tdpbf16ps", _BYTE(total), _BYTE(left), _BYTE(right))
        return []

    emit.loop(builder, steps, [], step)
    _call(builder, "tilestored64", _BYTE(total), emit.pointer(builder, out, _BYTE), integer(_ROW_BYTES))
