"""A timeout and an age that count only time in which this process's own loop ran, so that its own stall is not taken for
somebody else's silence.

A clock alone cannot tell the two apart. After a stall the timer is due in the same round of the loop in which the
answer, which arrived long before, is read for the first time. With one timer the answer would be thrown away.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType

TICKS = 4
LAST_LOOK_S = 0.001
"""Seconds from the last tick to the end. Some loops run timers before they read, so one more round is needed."""


class patience:
    """`async with patience(3.0):` raises `TimeoutError` like `asyncio.timeout`, after `seconds` of a loop that runs.

    The time goes by in `TICKS` ticks, and a tick that fires late counts as one. However long the loop stood still
    meanwhile, three quarters of the time are left, or what was left before."""

    def __init__(self, seconds: float) -> None:
        self._tick_s = seconds / TICKS
        self._num_left = TICKS
        self._limit = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        await self._limit.__aenter__()
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._tick_s, self._tick)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        await self._limit.__aexit__(kind, error, trace)

    def _tick(self) -> None:
        self._num_left -= 1
        if self._num_left:
            self._timer = self._loop.call_later(self._tick_s, self._tick)
        else:
            self._limit.reschedule(self._loop.time() + LAST_LOOK_S)


class Silence:
    """Calls `end` after `seconds` of a loop that runs, and up to a tick more, in which `heard` was not called. Unlike a
    `patience` for each sign of life, it has one timer, which a sign of life does not touch.
    """

    def __init__(self, seconds: float, end: Callable[[], None]) -> None:
        self._tick_s = seconds / TICKS
        self._end = end
        self._num_silent = 0
        """The number of ticks since the last sign of life."""
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._tick_s, self._tick)

    def heard(self) -> None:
        """Says that there was a sign of life."""
        self._num_silent = 0

    @property
    def is_long(self) -> bool:
        """Whether more than half of the time has gone by."""
        return self._num_silent > TICKS // 2

    def stop(self) -> None:
        self._timer.cancel()

    def _tick(self) -> None:
        self._num_silent += 1
        if self._num_silent <= TICKS:
            self._timer = self._loop.call_later(self._tick_s, self._tick)
        else:
            self._timer = self._loop.call_later(LAST_LOOK_S, self._look_again)

    def _look_again(self) -> None:
        if self._num_silent:
            self._end()
        else:
            self._tick()


class SilentTime:
    """How long another thread has given no sign of life, in seconds of a loop that runs and looks regularly.

    A stall of the whole process stops that thread too, and the loop may run again before it. So at most `most_s` seconds
    count between two looks.
    """

    def __init__(self, most_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_s = most_s
        self._clock = clock
        self._looked_at = clock()
        self._silent_s = 0.0

    def look(self, seen_at: float) -> float:
        """Returns the seconds since the last sign of life, which came at `seen_at`."""
        now = self._clock()
        passed = min(now - self._looked_at, self._most_s)
        self._looked_at = now
        self._silent_s = max(0.0, min(now - seen_at, self._silent_s + passed))
        return self._silent_s
