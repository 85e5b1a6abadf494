"""A timeout that counts only time in which this process's own loop ran, so that its own stall is not taken for a peer's
silence.

A clock alone cannot tell the two apart. After a stall the timer is due in the same round of the loop in which the
answer, which arrived long before, is read for the first time. With one timer the answer would be thrown away.
"""

from __future__ import annotations

import asyncio
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
