"""Sixteen float32 numbers side by side, as a type of numba's: loads, stores, arithmetic, and atomic operations of
threads.

It knows addresses and registers. It does not know what is computed from them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import models, overload, register_model

from kernels.cpu.emit import (
    FLOAT,
    HALVES,
    INT32,
    INT64,
    NUM,
    VECTOR,
    WORDS,
    fused,
    intrinsic,
    load_floats,
    load_widened,
    pointer,
    prefetch,
    shuffled,
    splat,
)


class LanesType(types.Type):
    def __init__(self) -> None:
        super().__init__("Lanes")


LANES = LanesType()


@register_model(LanesType)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, VECTOR)  # type: ignore[no-untyped-call]  # numba has no types for it


@intrinsic(LANES, types.int64)
def load(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return load_floats(builder, address)


@intrinsic(LANES, types.int64)
def load_bf16(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return load_widened(builder, address)


@intrinsic(types.void, types.int64, LANES)
def store(builder: ir.IRBuilder, address: ir.Value, lanes: ir.Value) -> None:
    builder.store(lanes, pointer(builder, address, VECTOR)).align = 4


@intrinsic(types.void, types.int64, LANES)
def store_bf16(builder: ir.IRBuilder, address: ir.Value, lanes: ir.Value) -> None:
    """Stores bfloat16, rounded to nearest even."""
    upper = builder.lshr(_nearest(builder, lanes), _word(16))
    narrow = builder.trunc(upper, HALVES)
    builder.store(narrow, pointer(builder, address, HALVES)).align = 2


@intrinsic(types.void, types.int64, LANES, LANES)
def store_pairs(builder: ir.IRBuilder, address: ir.Value, low: ir.Value, high: ir.Value) -> None:
    """Stores pairs of bfloat16, rounded to nearest even, a number of `low` and one of `high`."""
    upper = builder.and_(_nearest(builder, high), _word(0xFFFF0000))
    pairs = builder.or_(builder.lshr(_nearest(builder, low), _word(16)), upper)
    builder.store(pairs, pointer(builder, address, WORDS)).align = 4


def _word(value: int) -> ir.Value:
    return ir.Constant(WORDS, [value] * NUM)


def _nearest(builder: ir.IRBuilder, number: ir.Value) -> ir.Value:
    """Returns words whose upper halves are the nearest bfloat16."""
    words = builder.bitcast(number, WORDS)
    odd = builder.and_(builder.lshr(words, _word(16)), _word(1))
    near = builder.add(builder.add(words, _word(0x7FFF)), odd)
    is_none = builder.fcmp_unordered("uno", number, number)
    return builder.select(is_none, _word(0x7FC00000), near)


@intrinsic(LANES, types.float32)
def spread(builder: ir.IRBuilder, number: ir.Value) -> ir.Value:
    """Returns one number in every lane."""
    return splat(builder, number, VECTOR)


@intrinsic(LANES, LANES, LANES, LANES)
def fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return fused(builder, a, b, c)


@intrinsic(LANES, LANES, LANES)
def larger(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@intrinsic(LANES, LANES, LANES)
def smaller(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.select(builder.fcmp_ordered("<", a, b), a, b)


@intrinsic(LANES, LANES, LANES, LANES, LANES)
def where_below(builder: ir.IRBuilder, a: ir.Value, bound: ir.Value, low: ir.Value, other: ir.Value) -> ir.Value:
    """Returns `low` in the lanes where a is below the bound, `other` elsewhere."""
    return builder.select(builder.fcmp_ordered("<", a, bound), low, other)


@intrinsic(types.float32, LANES)
def first_of(builder: ir.IRBuilder, a: ir.Value) -> ir.Value:
    return builder.extract_element(a, INT32(0))


@intrinsic(LANES, LANES)
def rounded(builder: ir.IRBuilder, a: ir.Value) -> ir.Value:
    """Rounds to the nearest whole numbers."""
    kind = ir.FunctionType(VECTOR, [VECTOR])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.nearbyint.v16f32"), [a])


@intrinsic(LANES, LANES)
def power_of_two(builder: ir.IRBuilder, exponents: ir.Value) -> ir.Value:
    """Returns 2ⁿ for whole numbers from -126 to 127."""
    biased = builder.add(builder.fptosi(exponents, WORDS), _word(127))
    return builder.bitcast(builder.shl(biased, _word(23)), VECTOR)


@intrinsic(types.float32, LANES)
def total(builder: ir.IRBuilder, lanes: ir.Value) -> ir.Value:
    return _reduced(builder, lanes, builder.fadd)


@intrinsic(types.float32, LANES)
def largest(builder: ir.IRBuilder, lanes: ir.Value) -> ir.Value:
    return _reduced(builder, lanes, lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))


def _reduced(builder: ir.IRBuilder, halves: ir.Value, both: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
    for width in (8, 4, 2, 1):
        low, high = (shuffled(builder, halves, halves, list(range(at, at + width))) for at in (0, width))
        halves = both(low, high)
    return builder.extract_element(halves, INT32(0))


def _arithmetic(symbol: Any, name: str) -> None:
    """Defines an operator for two `Lanes`."""

    @intrinsic(LANES, LANES, LANES)
    def apply(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
        return getattr(builder, name)(a, b)

    def found(a, b):  # type: ignore[no-untyped-def]  # numba compares it with the lambda
        if isinstance(a, LanesType) and isinstance(b, LanesType):
            return lambda a, b: apply(a, b)
        return None

    overload(symbol)(found)


_arithmetic(operator.add, "fadd")
_arithmetic(operator.sub, "fsub")
_arithmetic(operator.mul, "fmul")
_arithmetic(operator.truediv, "fdiv")


@intrinsic(types.void, types.int64)
def ask(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Prefetches the 64 bytes at an address, which will be read soon."""
    prefetch(builder, address)


# --- single numbers in memory ---


@intrinsic(types.float32, types.int64)
def number_at(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.load(pointer(builder, address, FLOAT))


@intrinsic(types.int64, types.int64)
def integer_at(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.load(pointer(builder, address, INT64))


@intrinsic(types.void, types.int64, types.float32)
def put_number(builder: ir.IRBuilder, address: ir.Value, number: ir.Value) -> None:
    builder.store(number, pointer(builder, address, FLOAT))


@intrinsic(types.void, types.int64, types.int64)
def put_integer(builder: ir.IRBuilder, address: ir.Value, number: ir.Value) -> None:
    builder.store(number, pointer(builder, address, INT64))


# --- threads ---


@intrinsic(types.int64, types.int64, types.int64)
def add_at(builder: ir.IRBuilder, address: ir.Value, number: ir.Value) -> ir.Value:
    """Adds to the int64 at an address and returns its value before, as one atomic step for all threads."""
    return builder.atomic_rmw("add", pointer(builder, address, INT64), number, "seq_cst")


@intrinsic(types.int64, types.int64)
def seen_at(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Returns the int64 at an address as the last thread wrote it."""
    return builder.load_atomic(pointer(builder, address, INT64), "seq_cst", 8)


@intrinsic(types.void)
def pause(builder: ir.IRBuilder) -> None:
    """Gives the core's other hardware thread priority."""
    kind = ir.FunctionType(ir.VoidType(), [])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
