"""The numbers of lines of batches' input files: each file is counted once, and one file of a tenant at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from weakref import WeakValueDictionary

from aiohttp import web

MAX_KNOWN = 65_536
"""The most files whose number is remembered; beyond it the one that was counted first is forgotten."""


class LineCounts:
    """The counts of one gateway process. They stay right, because a file never changes."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def of(self, tenant_id: str, file_id: str, count: Callable[[], Awaitable[int]]) -> int:
        """Returns the number of lines of a file; `count` is called if nobody has counted it. Raises what `count` raises."""
        turn = self._turns.setdefault(tenant_id, asyncio.Lock())
        if file_id not in self._known:
            async with turn:
                if file_id not in self._known:
                    number = await count()
                    if len(self._known) >= MAX_KNOWN:
                        del self._known[next(iter(self._known))]
                    self._known[file_id] = number
        return self._known[file_id]


LINE_COUNTS = web.AppKey("line_counts", LineCounts)
