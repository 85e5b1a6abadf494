"""Sixteen float32 numbers side by side, as a type of numba's: loads, stores, arithmetic, and atomic operations of
threads.

It knows addresses and registers. It does not know what is computed from them.
"""

from __future__ import annotations

import operator
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, models, overload, register_model

from kernels.cpu.emit import (
    FLOAT,
    HALVES,
    INT32,
    INT64,
    NUM,
    VECTOR,
    WORDS,
    fused,
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


@intrinsic
def load(typing: Any, address: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return load_floats(builder, args[0])

    return LANES(types.int64), build


@intrinsic
def load_bf16(typing: Any, address: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return load_widened(builder, args[0])

    return LANES(types.int64), build


@intrinsic
def store(typing: Any, address: Any, lanes: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], pointer(builder, args[0], VECTOR)).align = 4
        return context.get_dummy_value()

    return types.void(types.int64, LANES), build


@intrinsic
def store_bf16(typing: Any, address: Any, lanes: Any) -> Any:
    """Stores bfloat16, rounded to nearest even."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        upper = builder.lshr(_nearest(builder, args[1]), _word(16))
        narrow = builder.trunc(upper, HALVES)
        builder.store(narrow, pointer(builder, args[0], HALVES)).align = 2
        return context.get_dummy_value()

    return types.void(types.int64, LANES), build


@intrinsic
def store_pairs(typing: Any, address: Any, low: Any, high: Any) -> Any:
    """Stores pairs of bfloat16, rounded to nearest even, a number of `low` and one of `high`."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, low, high = args
        upper = builder.and_(_nearest(builder, high), _word(0xFFFF0000))
        pairs = builder.or_(builder.lshr(_nearest(builder, low), _word(16)), upper)
        builder.store(pairs, pointer(builder, address, WORDS)).align = 4
        return context.get_dummy_value()

    return types.void(types.int64, LANES, LANES), build


def _word(value: int) -> ir.Value:
    return ir.Constant(WORDS, [value] * NUM)


def _nearest(builder: ir.IRBuilder, number: ir.Value) -> ir.Value:
    """Returns words whose upper halves are the nearest bfloat16."""
    words = builder.bitcast(number, WORDS)
    odd = builder.and_(builder.lshr(words, _word(16)), _word(1))
    near = builder.add(builder.add(words, _word(0x7FFF)), odd)
    is_none = builder.fcmp_unordered("uno", number, number)
    return builder.select(is_none, _word(0x7FC00000), near)


@intrinsic
def spread(typing: Any, number: Any) -> Any:
    """Returns one number in every lane."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return splat(builder, args[0], VECTOR)

    return LANES(types.float32), build


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return fused(builder, *args)

    return LANES(LANES, LANES, LANES), build


@intrinsic
def larger(typing: Any, a: Any, b: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return LANES(LANES, LANES), build


@intrinsic
def smaller(typing: Any, a: Any, b: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered("<", *args), *args)

    return LANES(LANES, LANES), build


@intrinsic
def where_below(typing: Any, a: Any, bound: Any, low: Any, other: Any) -> Any:
    """Returns `low` in the lanes where a is below the bound, `other` elsewhere."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered("<", args[0], args[1]), args[2], args[3])

    return LANES(LANES, LANES, LANES, LANES), build


@intrinsic
def first_of(typing: Any, a: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.extract_element(args[0], INT32(0))

    return types.float32(LANES), build


@intrinsic
def rounded(typing: Any, a: Any) -> Any:
    """Rounds to the nearest whole numbers."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(VECTOR, [VECTOR])
        name = "llvm.nearbyint.v16f32"
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)

    return LANES(LANES), build


@intrinsic
def power_of_two(typing: Any, exponents: Any) -> Any:
    """Returns 2ⁿ for whole numbers from -126 to 127."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        whole = builder.fptosi(args[0], WORDS)
        biased = builder.add(whole, ir.Constant(WORDS, [127] * NUM))
        return builder.bitcast(builder.shl(biased, ir.Constant(WORDS, [23] * NUM)), VECTOR)

    return LANES(LANES), build


def _reduction(name: str) -> Any:
    def reduce(typing: Any, lanes: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            halves = args[0]
            for width in (8, 4, 2, 1):
                low, high = (shuffled(builder, halves, halves, list(range(at, at + width))) for at in (0, width))
                if name == "sum":
                    halves = builder.fadd(low, high)
                else:
                    halves = builder.select(builder.fcmp_ordered(">", low, high), low, high)
            return builder.extract_element(halves, INT32(0))

        return types.float32(LANES), build

    return intrinsic(reduce)


total = _reduction("sum")
largest = _reduction("largest")


def _arithmetic(symbol: Any, name: str) -> None:
    """Defines an operator for two `Lanes`."""

    def typed(typing: Any, a: Any, b: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return getattr(builder, name)(*args)

        return LANES(LANES, LANES), build

    apply = intrinsic(typed)

    def found(a, b):  # type: ignore[no-untyped-def]  # numba compares it with the lambda
        if isinstance(a, LanesType) and isinstance(b, LanesType):
            return lambda a, b: apply(a, b)  # type: ignore[call-arg]  # numba hands over the typing context
        return None

    overload(symbol)(found)


_arithmetic(operator.add, "fadd")
_arithmetic(operator.sub, "fsub")
_arithmetic(operator.mul, "fmul")
_arithmetic(operator.truediv, "fdiv")


@intrinsic
def ask(typing: Any, address: Any) -> Any:
    """Prefetches the 64 bytes at an address, which will be read soon."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        prefetch(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), build


# --- single numbers in memory ---


def _scalar_load(kind: ir.Type, numba_kind: Any) -> Any:
    def fetch(typing: Any, address: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.load(pointer(builder, args[0], kind))

        return numba_kind(types.int64), build

    return intrinsic(fetch)


number_at = _scalar_load(FLOAT, types.float32)
integer_at = _scalar_load(INT64, types.int64)


@intrinsic
def put_number(typing: Any, address: Any, number: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], pointer(builder, args[0], FLOAT))
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), build


@intrinsic
def put_integer(typing: Any, address: Any, number: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], pointer(builder, args[0], INT64))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), build


# --- threads ---


@intrinsic
def add_at(typing: Any, address: Any, number: Any) -> Any:
    """Adds to the int64 at an address and returns its value before, as one atomic step for all threads."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", pointer(builder, args[0], INT64), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), build


@intrinsic
def seen_at(typing: Any, address: Any) -> Any:
    """Returns the int64 at an address as the last thread wrote it."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(pointer(builder, args[0], INT64), "seq_cst", 8)

    return types.int64(types.int64), build


@intrinsic
def pause(typing: Any) -> Any:
    """Gives the core's other hardware thread priority."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [])
        name = "llvm.x86.sse2.pause"
        builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [])
        return context.get_dummy_value()

    return types.void(), build
