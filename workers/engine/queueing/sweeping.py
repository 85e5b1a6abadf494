"""Heaps whose entries are not searched for when they become stale. The module bounds how many stale ones a heap holds."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, TypeVar

MAX_STALE = 64
"""Number of stale entries of a heap that are tolerated beyond twice the number of live ones."""

T = TypeVar("T", bound=tuple[Any, ...])


def swept(heap: list[T], num_live: int, lives: Callable[[T], bool]) -> list[T]:
    """Returns the heap, or a new one of its live entries if too many are stale. O(1) for each entry that was pushed,
    because at least half of the entries go when a heap is built anew."""
    if len(heap) <= 2 * num_live + MAX_STALE:
        return heap
    live = [entry for entry in heap if lives(entry)]
    heapq.heapify(live)
    return live
