"""The sweeper puts expired claims back into the queue, sends messages for work that waits, and deletes old files. It
runs every 15 s in every jobs process.

A lost message, a dead child or an emptied broker thus costs one sweep. Any number of sweepers may run at once.
"""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec

from accounting.batches import batch_runs, claims, files
from accounting.batches.file_store import FileStore
from accounting.database.db import Database
from workers.jobs.base.settings import JobsSettings

logger = logging.getLogger(__name__)

UNFINISHED_S = 86_400
PURGED_PER_SWEEP = 100
OTHERS_SWEEPS = 2
"""The sweeps in which a jobs process that lives finds its own claims, before others put them back."""


class Swept(msgspec.Struct, frozen=True):
    num_expired: int
    num_rings: int
    """The number of messages to send."""
    is_busy: bool
    """A child of this process runs a chunk."""


class Sweeper:
    def __init__(self, settings: JobsSettings, database: Database) -> None:
        self._settings = settings
        self._database = database
        self._store = FileStore(settings.files_dir)
        self._swept_ms: int | None = None
        """The database's time of the last sweep that succeeded."""
        self._purged_until = ""
        """The last file of the last purge, where more may follow; then the next one begins behind it."""

    async def sweep(self) -> Swept:
        settings = self._settings
        others_wait_ms = int(OTHERS_SWEEPS * settings.sweep_s * 1000)
        async with self._database.write() as conn:
            now = await claims.now_ms(conn)
            # After a time without SQL, claims have run out because no child could prolong them, and none has crashed.
            was_away = self._swept_ms is not None and now - self._swept_ms > others_wait_ms
            num_expired = await claims.expire(
                conn, now, settings.owner_prefix, others_wait_ms, counts_crashes=not was_away
            )
            num_waiting = await claims.num_claimable(conn, now, settings.jobs_concurrency)
            num_waiting += await batch_runs.is_due(conn, now, int(settings.quiet_s * 1000))
            is_busy = await claims.has_live_claim(conn, now, settings.owner_prefix)
        self._swept_ms = now
        return Swept(num_expired, min(num_waiting, settings.jobs_concurrency), is_busy)

    async def purge_files(self) -> None:
        """Deletes the bytes of old files. It comes after the rings, which must not wait for a disk. A file that cannot
        be deleted is told in the log and tried again when all others have had their turn."""
        async with self._database.read() as conn:
            now = await claims.now_ms(conn) // 1000
            gone = await files.purgeable(conn, now, PURGED_PER_SWEEP, after=self._purged_until)
        self._purged_until = gone[-1][0] if len(gone) == PURGED_PER_SWEEP else ""
        for file_id, storage_key in gone:
            # The bytes are deleted first: a row without bytes is a 404, but bytes without a row would stay for ever.
            try:
                await asyncio.to_thread(self._store.delete, storage_key)
            except OSError as error:
                logger.warning("file_not_deleted", extra={"file": file_id, "reason": str(error)[:200]})
                continue
            async with self._database.write() as conn:
                await files.purged(conn, file_id)
        await asyncio.to_thread(self._store.drop_unfinished, time.time() - UNFINISHED_S)
