"""Sixteen float32 numbers side by side, as a type of numba's: loads, stores, arithmetic, and what threads meet at.

Knows addresses and registers. Does not know what is computed from them. Every operation is one or a few instructions of
LLVM's, which picks the CPU's own; addresses are int64 in bytes and need no alignment beyond that of a number.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, models, overload, register_model

NUM = 16
_FLOAT, _INT32, _INT16, _INT64 = ir.FloatType(), ir.IntType(32), ir.IntType(16), ir.IntType(64)
VECTOR = ir.VectorType(_FLOAT, NUM)
_WORDS = ir.VectorType(_INT32, NUM)
_HALVES = ir.VectorType(_INT16, NUM)


class _BFloat(ir.Type):
    """llvmlite names no such type; LLVM has it."""

    null = "0.0"
    intrinsic_name = "bf16"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_BFLOAT = _BFloat()
PAIRS = ir.VectorType(_BFLOAT, 2 * NUM)


class LanesType(types.Type):
    def __init__(self) -> None:
        super().__init__("Lanes")


LANES = LanesType()


@register_model(LanesType)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, VECTOR)


def has_bf16_products() -> bool:
    """Whether this CPU multiplies pairs of bfloat16 and adds them up in float32."""
    features = llvmlite.binding.get_host_cpu_features()
    return bool(features.get("avx512bf16")) and bool(features.get("avx512bw"))


def has_wide_registers() -> bool:
    return bool(llvmlite.binding.get_host_cpu_features().get("avx512f"))


# --- building blocks of the intrinsics ---


def pointer(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    return builder.inttoptr(address, kind.as_pointer())


def load_vector(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type, align: int) -> ir.Value:
    found = builder.load(pointer(builder, address, kind))
    found.align = align
    return found


def splat(builder: ir.IRBuilder, value: ir.Value, kind: ir.VectorType) -> ir.Value:
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, _INT32(0))
    mask = ir.Constant(ir.VectorType(_INT32, kind.count), [0] * kind.count)
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), mask)


def widened(builder: ir.IRBuilder, halves: ir.Value) -> ir.Value:
    """bfloat16 is the upper half of float32."""
    words = builder.zext(halves, _WORDS)
    shift = ir.Constant(_WORDS, [16] * NUM)
    return builder.bitcast(builder.shl(words, shift), VECTOR)


def fused(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """a · b + c, rounded once."""
    kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v16f32")
    return builder.call(function, [a, b, c])


def pair_products(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """`a` and `b`: 16 pairs of bfloat16. Where the CPU has no such instruction nobody gets here."""
    if not has_bf16_products():
        return c
    kind = ir.FunctionType(VECTOR, [VECTOR, PAIRS, PAIRS])
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, [c, a, b])


def as_pairs(builder: ir.IRBuilder, words: ir.Value) -> ir.Value:
    return builder.bitcast(words, PAIRS)


def load_word(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """The same pair of bfloat16 sixteen times."""
    return as_pairs(builder, splat(builder, load_vector(builder, address, _INT32, 2), _WORDS))


def load_number(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """The same float32 sixteen times."""
    return splat(builder, load_vector(builder, address, _FLOAT, 4), VECTOR)


def load_pairs(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return as_pairs(builder, load_vector(builder, address, _WORDS, 2))


def load_floats(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return load_vector(builder, address, VECTOR, 4)


def load_words(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return load_vector(builder, address, _WORDS, 2)


def both_widened(builder: ir.IRBuilder, words: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The first and the second of each of 16 pairs of bfloat16."""
    low = builder.shl(words, ir.Constant(_WORDS, [16] * NUM))
    high = builder.and_(words, ir.Constant(_WORDS, [0xFFFF0000] * NUM))
    return builder.bitcast(low, VECTOR), builder.bitcast(high, VECTOR)


def load_widened(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return widened(builder, load_vector(builder, address, _HALVES, 2))


def prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Into the core's second cache."""
    byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
    name = "llvm.prefetch.p0"
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    builder.call(function, [builder.inttoptr(address, byte), flag(0), flag(2), flag(1)])


def shuffled(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, mask: list[int]) -> ir.Value:
    kind = ir.VectorType(_INT32, len(mask))
    return builder.shuffle_vector(a, b, ir.Constant(kind, mask))


Vectors = list[list[ir.Value]]


def loop(
    builder: ir.IRBuilder,
    number: ir.Value,
    vectors: Vectors,
    step: Callable[[ir.Value, Vectors], Vectors],
) -> Vectors:
    """`step` of 0 … number - 1, at least of 0; each gets the vectors that the one before it made."""
    before, body = builder.block, builder.append_basic_block("loop")
    behind = builder.append_basic_block("loop.end")
    builder.branch(body)
    builder.position_at_end(body)
    place = builder.phi(number.type)
    place.add_incoming(number.type(0), before)
    carried = [[builder.phi(VECTOR) for _ in line] for line in vectors]
    made = step(place, carried)
    following = builder.add(place, number.type(1))
    place.add_incoming(following, body)
    for old, new, first in zip(*map(_flat, (carried, made, vectors)), strict=True):
        old.add_incoming(first, before)
        old.add_incoming(new, body)
    builder.cbranch(builder.icmp_signed("<", following, number), body, behind)
    builder.position_at_end(behind)
    return made


def choose(
    builder: ir.IRBuilder, value: ir.Value, bodies: Mapping[int, Callable[[], None]]
) -> None:
    """Runs the body of this value; that of the largest one for values above it."""
    behind = builder.append_basic_block("chosen")
    blocks = {number: builder.append_basic_block(f"choice.{number}") for number in bodies}
    switch = builder.switch(value, blocks[max(bodies)])
    for number, block in blocks.items():
        switch.add_case(value.type(number), block)
        builder.position_at_end(block)
        bodies[number]()
        builder.branch(behind)
    builder.position_at_end(behind)


def _flat(vectors: Vectors) -> list[ir.Value]:
    return [vector for line in vectors for vector in line]


# --- vectors ---


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
    """Rounded to nearest even."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number, words = args[1], builder.bitcast(args[1], _WORDS)

        def word(value: int) -> ir.Value:
            return ir.Constant(_WORDS, [value] * NUM)

        odd = builder.and_(builder.lshr(words, word(16)), word(1))
        upper = builder.lshr(builder.add(builder.add(words, word(0x7FFF)), odd), word(16))
        is_none = builder.fcmp_unordered("uno", number, number)
        narrow = builder.trunc(builder.select(is_none, word(0x7FC0), upper), _HALVES)
        builder.store(narrow, pointer(builder, args[0], _HALVES)).align = 2
        return context.get_dummy_value()

    return types.void(types.int64, LANES), build


@intrinsic
def spread(typing: Any, number: Any) -> Any:
    """One number in every lane."""

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
    """`low` in the lanes where a is below the bound."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered("<", args[0], args[1]), args[2], args[3])

    return LANES(LANES, LANES, LANES, LANES), build


@intrinsic
def first_of(typing: Any, a: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.extract_element(args[0], _INT32(0))

    return types.float32(LANES), build


@intrinsic
def rounded(typing: Any, a: Any) -> Any:
    """To the nearest whole numbers."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(VECTOR, [VECTOR])
        name = "llvm.nearbyint.v16f32"
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)

    return LANES(LANES), build


@intrinsic
def power_of_two(typing: Any, exponents: Any) -> Any:
    """2ⁿ of whole numbers from -126 to 127."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        whole = builder.fptosi(args[0], _WORDS)
        biased = builder.add(whole, ir.Constant(_WORDS, [127] * NUM))
        return builder.bitcast(builder.shl(biased, ir.Constant(_WORDS, [23] * NUM)), VECTOR)

    return LANES(LANES), build


def _reduction(name: str) -> Any:
    def reduce(typing: Any, lanes: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            halves = args[0]
            for width in (8, 4, 2, 1):
                low, high = (
                    shuffled(builder, halves, halves, list(range(at, at + width)))
                    for at in (0, width)
                )
                if name == "sum":
                    halves = builder.fadd(low, high)
                else:
                    halves = builder.select(builder.fcmp_ordered(">", low, high), low, high)
            return builder.extract_element(halves, _INT32(0))

        return types.float32(LANES), build

    return intrinsic(reduce)


total = _reduction("sum")
largest = _reduction("largest")


def _arithmetic(symbol: Any, name: str) -> None:
    """Lets two `Lanes` meet at an operator."""

    def typed(typing: Any, a: Any, b: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return getattr(builder, name)(*args)

        return LANES(LANES, LANES), build

    apply = intrinsic(typed)

    def found(a, b):  # type: ignore[no-untyped-def]  # numba compares it with the lambda
        if isinstance(a, LanesType) and isinstance(b, LanesType):
            return lambda a, b: apply(a, b)
        return None

    overload(symbol)(found)


_arithmetic(operator.add, "fadd")
_arithmetic(operator.sub, "fsub")
_arithmetic(operator.mul, "fmul")
_arithmetic(operator.truediv, "fdiv")


# --- single numbers in memory ---


def _scalar_load(kind: ir.Type, numba_kind: Any) -> Any:
    def fetch(typing: Any, address: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.load(pointer(builder, args[0], kind))

        return numba_kind(types.int64), build

    return intrinsic(fetch)


number_at = _scalar_load(_FLOAT, types.float32)
integer_at = _scalar_load(_INT64, types.int64)


@intrinsic
def put_number(typing: Any, address: Any, number: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], pointer(builder, args[0], _FLOAT))
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), build


# --- threads ---


@intrinsic
def add_at(typing: Any, address: Any, number: Any) -> Any:
    """Adds to the int64 there and returns what was there before, as one step for all threads."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", pointer(builder, args[0], _INT64), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), build


@intrinsic
def seen_at(typing: Any, address: Any) -> Any:
    """The int64 there as the last thread left it."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(pointer(builder, args[0], _INT64), "seq_cst", 8)

    return types.int64(types.int64), build


@intrinsic
def pause(typing: Any) -> Any:
    """Lets the core's other thread go first."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [])
        name = "llvm.x86.sse2.pause"
        builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [])
        return context.get_dummy_value()

    return types.void(), build
