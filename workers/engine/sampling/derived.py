"""Values that are made once for each object that steps bring again and again. They leave with the object.

It knows objects by their identity, so whoever brings one never changes it. It does not know what the values mean.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

S = TypeVar("S")
V = TypeVar("V")


class Derived(Generic[S, V]):
    def __init__(self, make: Callable[[S], V]) -> None:
        """Keeps what `make` returns for an object. The value must not hold the object."""
        self._make = make
        self._known: dict[int, tuple[weakref.ref[Any], V]] = {}
        """Values by the id of an object, with the object that has this id."""

    def of(self, source: S) -> V:
        """Returns the value of an object, the same in each call. It is made anew in each call for an object to which no
        weak reference is possible, such as a list."""
        key = id(source)
        known = self._known.get(key)
        if known is not None and known[0]() is source:
            return known[1]
        value = self._make(source)
        try:
            self._known[key] = weakref.ref(source, lambda gone: self._forget(key, gone)), value
        except TypeError:
            pass
        return value

    def _forget(self, key: int, gone: weakref.ref[Any]) -> None:
        known = self._known.get(key)
        if known is not None and known[0] is gone:  # else another object has the id by now
            del self._known[key]
