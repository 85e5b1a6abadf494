"""A bucket for each name: so many things at once, then some a second. The clock is given."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

MAX_REMEMBERED = 50_000
"""The most buckets. Beyond them the one that was used least recently is full again."""


class Buckets:
    def __init__(self, burst: int, per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._burst = burst
        self._per_s = per_s
        self._clock = clock
        self._full_at: OrderedDict[str, float] = OrderedDict()
        """Name → the time at which its bucket will be full again."""

    def blocked_ms(self, name: str) -> int:
        """Returns the milliseconds until something may be taken again; 0 means now."""
        missing = (self._full_at.get(name, 0.0) - self._clock()) * self._per_s
        return max(0, int((missing - self._burst + 1) / self._per_s * 1000))

    def take(self, name: str) -> None:
        self._full_at[name] = max(self._full_at.get(name, 0.0), self._clock()) + 1 / self._per_s
        self._full_at.move_to_end(name)
        if len(self._full_at) > MAX_REMEMBERED:
            self._full_at.popitem(last=False)
