"""Triton's interpreter, without what it does again and again.

It replaces the functions of `triton.language` when a kernel is launched, and once more whenever a kernel calls a function
of its own, for which it looks at every member of the package. It builds the table of numpy's types for each value. Both
together are a third of the time of tests/kernels. Of what is left, it computes each sum of integers once more in 64 bits
and throws the result away unless it debugs, and makes the shape and the name of a type anew for each value: half.

Of the rest, a third: it broadcasts operands that have one shape (it compares a tuple with a list), makes a type anew for
each operand, goes through three functions to call a builtin, and makes an array for each constant.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def make_cheaper() -> None:
    interpreter._patch_lang = _once_a_launch(interpreter._patch_lang)
    interpreter._patch_attr = _patch_attr
    interpreter._get_np_dtype = _remembered(interpreter._get_np_dtype)
    TritonSemantic.binary_op_sanitize_overflow_impl = _if_debugging(TritonSemantic.binary_op_sanitize_overflow_impl)
    TritonSemantic.broadcast_impl_value = _unless_alike(TritonSemantic.broadcast_impl_value)
    TritonSemantic.scalar_constant = _made_once(TritonSemantic.scalar_constant)
    tl.core.block_type.__init__ = _described_once(tl.core.block_type.__init__)
    tl.core.block_type.with_element_ty = _with_element_ty
    tl.core.tensor.__init__ = _with_known_shape
    tl.core.dtype.is_int = _is_int
    interpreter.TensorHandle.__init__ = _checked


def _once_a_launch(patch_lang: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A launch puts the package back at its end, so a module that is replaced now was replaced for this launch, or is
    one that the interpreter never puts back."""

    @functools.cache
    def packages_of(fn: Any) -> list[Any]:
        return [value for value in fn.__globals__.values() if inspect.ismodule(value) and value in (tl, tl.core)]

    def patched(fn: Any) -> Any:
        packages = packages_of(fn)
        samples = [tl.tensor.__add__, *(package.load for package in packages)]
        if packages and not any(map(tl.core.is_builtin, samples)):
            return interpreter._LangPatchScope()
        return patch_lang(fn)

    return patched


def _remembered(np_dtype: Callable[[Any], Any]) -> Callable[[Any], Any]:
    of_number = functools.cache(np_dtype)

    def found(tl_dtype: Any) -> Any:
        number = tl_dtype.scalar
        return of_number(number) if type(number) is tl.dtype else np_dtype(tl_dtype)  # pointers have no hash

    return found


def _if_debugging(check: Callable[..., None]) -> Callable[..., None]:
    """`device_assert`, which gets the result, drops it otherwise."""

    def checked(semantic: Any, *arguments: Any) -> None:
        if semantic.builder.options.debug:
            check(semantic, *arguments)

    return checked


def _patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """A builtin's wrapper only looks whether it is told the semantic, which is always told here."""
    call = member.__wrapped__ if getattr(member, "__code__", None) is _BUILTIN else member

    def patched(*args: Any, **options: Any) -> Any:
        options["_semantic"] = interpreter.interpreter_semantic
        return call(*args, **options)

    scope.set_attr(obj, name, patched)


_BUILTIN = tl.core.builtin(lambda: None).__code__


def _unless_alike(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    def impl(semantic: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block() and left.shape is right.shape:
            return lhs, rhs
        return broadcast(semantic, lhs, rhs)

    return impl


def _made_once(constant: Callable[..., Any]) -> Callable[..., Any]:
    """Nothing may write into a constant's array."""
    known: dict[tuple[type, Any, str], Any] = {}

    def found(semantic: Any, value: Any, dtype: Any) -> Any:
        if type(value) not in (int, float) or value != value or type(dtype) is not tl.dtype:
            return constant(semantic, value, dtype)
        key = type(value), value, dtype.name
        if key not in known:
            known[key] = constant(semantic, value, dtype).handle
            known[key].data.flags.writeable = False
        return semantic.tensor(known[key], dtype)

    return found


_shapes: dict[tuple[int, ...], tuple[Any, int]] = {}
"""The shape and the number of elements of blocks of these sizes. Blocks of the same sizes have the same shape object."""
_of_shape: dict[int, tuple[Any, Any]] = {}
"""The number of elements and the shape that a tensor has, by the id of its type's shape: these are kept for ever."""


def _described_once(init: Callable[..., None]) -> Callable[..., None]:
    names: dict[tuple[str, tuple[int, ...]], str] = {}

    def __init__(self: Any, element_ty: Any, shape: Any) -> None:
        values = shape.values if type(shape) is tl.core.tuple else shape
        sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in values])
        key = (element_ty.name, sizes)
        if key in names:
            self.element_ty = element_ty
            self.shape, self.numel = _shapes[sizes]
            self.name = names[key]
        else:
            init(self, element_ty, shape)
            self.shape, _ = _shapes.setdefault(sizes, (self.shape, self.numel))
            _of_shape[id(self.shape)] = _shape(sizes)
            names[key] = self.name

    return __init__


_with_elements: dict[tuple[int, str], Any] = {}


def _with_element_ty(self: Any, scalar_ty: Any) -> Any:
    if type(scalar_ty) is not tl.dtype or id(self.shape) not in _of_shape:
        return tl.core.block_type(scalar_ty, self.shape)
    key = id(self.shape), scalar_ty.name
    if key not in _with_elements:
        _with_elements[key] = tl.core.block_type(scalar_ty, self.shape)
    return _with_elements[key]


@functools.cache
def _shape(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    return tl.constexpr(math.prod(sizes)), tl.core.tuple([tl.constexpr(size) for size in sizes])


def _with_known_shape(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    if not type.is_block():
        self.numel, self.shape = _shape(())
    else:
        self.numel, self.shape = _of_shape.get(id(type.shape)) or _shape(tuple(type.shape))


_INTEGERS = frozenset(tl.dtype.SINT_TYPES + tl.dtype.UINT_TYPES)


def _is_int(self: Any) -> bool:
    return self.name in _INTEGERS


def _checked(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
    if data.itemsize > 1 and not isinstance(dtype, tl.pointer_type) and 8 * data.itemsize > dtype.primitive_bitwidth:
        self.__post_init__()  # it refuses the array, and says why
