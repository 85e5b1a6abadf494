"""Requests that wait until more lines of a batch have ended, or the batch itself has.

One query looks for all that wait in this process, however many they are, and there is none while nobody waits. No tenant
may have more waits than are left for all others.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping

from aiohttp import web
from sqlalchemy.exc import SQLAlchemyError

from accounting.batches import batches
from accounting.batches.batches import Progress
from gateway.base import errors
from gateway.base.app_keys import DATABASE, DETACHED, LIFECYCLE
from gateway.base.running import RETRY_MS, Places
from workers.process.rounds import within

MOST_S = 60
"""The longest wait."""
LOOK_EVERY_S = 0.5
MOST = 256
"""The most waits of a process."""


class BatchWaits:
    """The waits of this process."""

    def __init__(self, app: web.Application, most: int = MOST) -> None:
        self._app = app
        self._places = Places(most)
        self._waiting: defaultdict[str, dict[asyncio.Future[None], Progress]] = defaultdict(dict)
        """The waits for each batch, with the progress that their requests have seen."""
        self._looking: asyncio.Task[None] | None = None

    @property
    def num(self) -> int:
        return self._places.num

    async def changed(self, tenant_id: str, batch_id: str, seen: Progress, until: float) -> bool:
        """Waits until the batch's progress is another one than `seen`, until `until` by the monotonic clock at most, and
        not while the process drains. Returns whether it changed. Raises `ApiError` 429 where no place is left.
        """
        with self._places.place(tenant_id) as has_place:
            if not has_place:
                raise errors.too_many("Too many requests wait for results of batches.", RETRY_MS, type="concurrency")
            news = asyncio.get_running_loop().create_future()
            self._waiting[batch_id][news] = seen
            try:
                if self._looking is None:
                    self._looking = self._app[DETACHED].spawn(self._look(), "progress of batches")
                done, _ = await asyncio.wait([news], timeout=max(0.0, until - time.monotonic()))
                return bool(done) and not self._app[LIFECYCLE].draining.is_set()
            finally:
                self._forget(batch_id, news)

    def _forget(self, batch_id: str, news: asyncio.Future[None]) -> None:
        waiting = self._waiting[batch_id]
        waiting.pop(news, None)
        if not waiting:
            del self._waiting[batch_id]

    async def _look(self) -> None:
        """Looks for news as long as somebody waits, and ends all waits when the process drains."""
        draining = self._app[LIFECYCLE].draining
        try:
            while self._waiting:
                if await within(draining, LOOK_EVERY_S):
                    self._compare({})
                    return
                try:
                    async with self._app[DATABASE].read() as conn:
                        self._compare(await batches.progress(conn, list(self._waiting)))
                except (SQLAlchemyError, OSError):
                    continue  # who has waited long enough asks SQL, and hears what is wrong
        finally:
            self._looking = None

    def _compare(self, found: Mapping[str, Progress]) -> None:
        """Ends the waits for batches of which something else was found than was seen, or nothing."""
        for batch_id, waiting in self._waiting.items():
            for news, seen in waiting.items():
                if found.get(batch_id) != seen and not news.done():
                    news.set_result(None)


BATCH_WAITS = web.AppKey("batch_waits", BatchWaits)
