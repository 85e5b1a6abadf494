"""Building blocks of the compiled functions below their Python: vectors of LLVM, loops over them, choices among them.

It knows LLVM's instructions. It does not know what is computed. Every helper adds instructions to the builder's current
function and returns their result; addresses are int64 in bytes and need no alignment beyond that of a number.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import llvmlite.binding
import numba.extending
from llvmlite import ir
from numba.core import cgutils

from kernels.cpu import instructions

NUM = 16
FLOAT, INT32, INT16, INT64 = ir.FloatType(), ir.IntType(32), ir.IntType(16), ir.IntType(64)
VECTOR = ir.VectorType(FLOAT, NUM)
WORDS = ir.VectorType(INT32, NUM)
HALVES = ir.VectorType(INT16, NUM)


class _BFloat(ir.Type):  # type: ignore[misc]  # llvmlite has no types
    """The type bfloat, which LLVM has and llvmlite does not define."""

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


def has_bf16_products() -> bool:
    """Returns whether this CPU multiplies pairs of bfloat16 and adds them up in float32."""
    return instructions.has("bf16") and _knows("avx512bf16") and _knows("avx512bw")


def has_tiles() -> bool:
    """Returns whether LLVM knows that this CPU multiplies tiles of bfloat16. What is compiled depends on nothing else: a
    process that is told of another kind of CPU has the same functions, and does not call those of the unit."""
    return _knows("amx-tile") and _knows("amx-bf16")


def has_wide_registers() -> bool:
    return instructions.has("avx512") and _knows("avx512f")


def _knows(feature: str) -> bool:
    """Returns whether LLVM would use the feature on this CPU."""
    try:
        return bool(llvmlite.binding.get_host_cpu_features().get(feature))
    except RuntimeError:  # it cannot tell for every kind of CPU
        return False


def intrinsic(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Makes a function that numba's functions call, with a result and arguments of these types of numba's. What is decorated
    emits its instructions: it takes the builder and a value for each argument, and returns the result, or None for `void`."""

    def decorate(emit: Callable[..., Any]) -> Any:
        def build(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            found = emit(builder, *values)
            return context.get_dummy_value() if found is None else found

        def typed(_typing: Any, *_values: Any) -> Any:
            return result(*arguments), build

        # numba takes the number of arguments from here.
        taken = [inspect.Parameter(f"_{n}", inspect.Parameter.POSITIONAL_ONLY) for n in range(len(arguments) + 1)]
        typed.__name__, typed.__doc__ = emit.__name__, emit.__doc__
        typed.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]  # typeshed has it on no function; `inspect` reads it
        return numba.extending.intrinsic(typed)

    return decorate


# --- building blocks of the intrinsics ---


def pointer(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    return builder.inttoptr(address, kind.as_pointer())


def load_vector(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type, align: int) -> ir.Value:
    found = builder.load(pointer(builder, address, kind))
    found.align = align
    return found


def splat(builder: ir.IRBuilder, value: ir.Value, kind: ir.VectorType) -> ir.Value:
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, INT32(0))
    mask = ir.Constant(ir.VectorType(INT32, kind.count), [0] * kind.count)
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), mask)


def widened(builder: ir.IRBuilder, halves: ir.Value) -> ir.Value:
    """Widens bfloat16 to float32, of which it is the upper half."""
    words = builder.zext(halves, WORDS)
    shift = ir.Constant(WORDS, [16] * NUM)
    return builder.bitcast(builder.shl(words, shift), VECTOR)


def fused(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """Returns a · b + c, rounded once."""
    kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v16f32")
    return builder.call(function, [a, b, c])


def pair_products(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """Adds products of `a` and `b`, 16 pairs of bfloat16 each, to `c`. The function is never run on a CPU without such
    an instruction."""
    if not has_bf16_products():
        return c
    kind = ir.FunctionType(VECTOR, [VECTOR, PAIRS, PAIRS])
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, [c, a, b])


def as_pairs(builder: ir.IRBuilder, words: ir.Value) -> ir.Value:
    return builder.bitcast(words, PAIRS)


def load_word(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Loads a pair of bfloat16 and repeats it sixteen times."""
    return as_pairs(builder, splat(builder, load_vector(builder, address, INT32, 2), WORDS))


def load_number(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Loads a float32 and repeats it sixteen times."""
    return splat(builder, load_vector(builder, address, FLOAT, 4), VECTOR)


def load_pairs(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return as_pairs(builder, load_vector(builder, address, WORDS, 2))


def load_floats(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return load_vector(builder, address, VECTOR, 4)


def load_words(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return load_vector(builder, address, WORDS, 2)


def both_widened(builder: ir.IRBuilder, words: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Returns the first and the second number of each of 16 pairs of bfloat16, in float32."""
    low = builder.shl(words, ir.Constant(WORDS, [16] * NUM))
    high = builder.and_(words, ir.Constant(WORDS, [0xFFFF0000] * NUM))
    return builder.bitcast(low, VECTOR), builder.bitcast(high, VECTOR)


def load_widened(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return widened(builder, load_vector(builder, address, HALVES, 2))


def prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Prefetches an address into the core's second-level cache."""
    byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
    name = "llvm.prefetch.p0"
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    builder.call(function, [builder.inttoptr(address, byte), flag(0), flag(2), flag(1)])


def shuffled(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, mask: list[int]) -> ir.Value:
    kind = ir.VectorType(INT32, len(mask))
    return builder.shuffle_vector(a, b, ir.Constant(kind, mask))


Vectors = list[list[ir.Value]]


def loop(
    builder: ir.IRBuilder, number: ir.Value, vectors: Vectors, step: Callable[[ir.Value, Vectors], Vectors]
) -> Vectors:
    """Emits a loop that runs `step` for 0 … number - 1, at least for 0; each run gets the vectors that the one before
    it returned."""
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


def choose(builder: ir.IRBuilder, value: ir.Value, bodies: Mapping[int, Callable[[], None]]) -> None:
    """Emits a switch that runs the body of this value, and the largest one's body for values above it."""
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
