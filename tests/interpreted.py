"""Triton's interpreter, without what it does again and again.

It replaces the functions of `triton.language` when a kernel is launched, and once more whenever a kernel calls a function
of its own, for which it looks at every member of the package. It builds the table of numpy's types for each value. Both
together are a third of the time of tests/kernels. Of what is left, it computes each sum of integers once more in 64 bits
and throws the result away unless it debugs, and makes the shape and the name of a type anew for each value: half.
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
    interpreter._get_np_dtype = _remembered(interpreter._get_np_dtype)
    TritonSemantic.binary_op_sanitize_overflow_impl = _if_debugging(TritonSemantic.binary_op_sanitize_overflow_impl)
    tl.core.block_type.__init__ = _described_once(tl.core.block_type.__init__)
    tl.core.tensor.__init__ = _with_known_shape


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


def _described_once(init: Callable[..., None]) -> Callable[..., None]:
    known: dict[tuple[str, tuple[int, ...]], tuple[Any, int, str]] = {}

    def __init__(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape))
        if key in known:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = known[key]
        else:
            init(self, element_ty, shape)
            known[key] = (self.shape, self.numel, self.name)

    return __init__


@functools.cache
def _shape(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    return tl.constexpr(math.prod(sizes)), tl.core.tuple([tl.constexpr(size) for size in sizes])


def _with_known_shape(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _shape(tuple(type.shape) if type.is_block() else ())
