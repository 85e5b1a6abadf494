"""The records of a worker: what it reports of ended requests and of its cache, kept in SQL while the link serves streams.
This module has no sockets.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from gateway.base.lifecycle import uninterrupted
from workers.process.rounds import restarted, within
from workers.protocol.counts import MAX_RECORDS_IN_FRAME, EngineAck, EngineRecords, ResidencyReport

logger = logging.getLogger(__name__)

RECORDS_EVERY_S = 0.2
"""A worker's records are kept this often at most: a transaction costs as much as hundreds of its rows."""
LAST_RECORDS_S, NO_MORE_S = 1.0, 0.05
"""How long a gateway that ends keeps a worker's last records, and how soon the next ones follow an answer."""
MAX_WAITING = 64

KeepRecords = Callable[[EngineRecords | ResidencyReport], Coroutine[Any, Any, EngineAck | None]]
"""Commits a worker's records to SQL, however long that takes, and returns the answer to the worker."""


class WorkerRecords:
    """The records of one link. `begin` it when the link is up, and `stop` it when it ends."""

    def __init__(self, worker: str, keep: KeepRecords, answer: Callable[[EngineAck], None]) -> None:
        self._worker = worker
        self._keep = keep
        self._answer = answer
        self._waiting: asyncio.Queue[EngineRecords | ResidencyReport] = asyncio.Queue(MAX_WAITING)
        self._keeping: asyncio.Task[None] | None = None
        self._is_keeping = False
        self._answered_at = 0.0
        self._finishing = asyncio.Event()

    @property
    def num_waiting(self) -> int:
        return self._waiting.qsize()

    def begin(self) -> None:
        self._keeping = asyncio.create_task(restarted(self._keep_all))

    def stop(self) -> None:
        """Takes nothing more. What is being written goes on; `until_kept` waits for it."""
        if self._keeping is not None:
            self._keeping.cancel()

    async def until_kept(self) -> None:
        """Waits for the records that were being written at the stop, for some seconds at most."""
        if self._keeping is not None:
            await asyncio.wait([self._keeping])

    def take(self, records: EngineRecords | ResidencyReport) -> None:
        try:
            self._waiting.put_nowait(records)
        except asyncio.QueueFull:
            pass  # the worker sends unacknowledged records again, and residency each minute

    async def finish(self) -> None:
        """Keeps what the worker still has, without a pause. Call it once no request runs any more."""
        self._finishing.set()
        until = time.monotonic() + LAST_RECORDS_S
        while (now := time.monotonic()) < until:
            if not (self._is_keeping or self.num_waiting or now < self._answered_at + NO_MORE_S):
                return
            await asyncio.sleep(NO_MORE_S / 5)

    async def _keep_all(self) -> None:
        """Keeps what the worker reports. The worker gathers the next records until it has its answer, so a pause here makes
        one transaction of many.
        """
        while True:
            records = await self._waiting.get()
            began, self._is_keeping = time.monotonic(), True
            try:
                answer = await uninterrupted(self._keep(records))
            except Exception:  # a fault of ours: other records are still kept
                logger.exception("worker_records_not_kept", extra={"worker": self._worker})
                answer = None
            if answer is not None:
                self._answer(answer)
            self._answered_at, self._is_keeping = time.monotonic(), False
            if isinstance(records, EngineRecords) and len(records.records) >= MAX_RECORDS_IN_FRAME:
                continue  # more wait than a pause gathers
            await within(self._finishing, began + RECORDS_EVERY_S - self._answered_at)
