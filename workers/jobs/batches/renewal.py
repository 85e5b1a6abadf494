"""The claim on a batch is renewed as long as work on it runs: no other child takes up a long validation or finalisation."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from accounting.batches import batch_runs, claims
from accounting.batches.batch_runs import BatchClaim
from accounting.batches.file_store import FileStore
from accounting.database.db import Database
from workers.jobs.base.settings import JobsSettings
from workers.jobs.base.time_limit import TimeLimit

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BatchWork:
    """A step in the life of a claimed batch, and what it works with."""

    _settings: JobsSettings
    _database: Database
    _store: FileStore
    _held: BatchClaim
    _data_key: bytes
    _limit: TimeLimit

    async def _under_claim(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` and renews the claim meanwhile. Raises `ClaimLost` when `work` has been cancelled for that."""
        task = asyncio.create_task(work)
        try:
            while True:
                done, _ = await asyncio.wait([task], timeout=self._settings.renew_s)
                if done:
                    return task.result()
                async with self._database.write() as conn:
                    now = await claims.now_ms(conn)
                    await batch_runs.renew(conn, self._held, now, int(self._settings.claim_s * 1000))
        except BaseException:
            task.cancel()
            await asyncio.wait([task])
            raise
