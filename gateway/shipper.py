"""Carries one slot's journal into SQL, and the workers' own records with it. The offset moves in the same transaction.

Whatever SQL does, a record is posted once: an unknown COMMIT repeats the same records, which their primary key knows;
a database that lost its tail took the offset back with it, and the journal is read again from there. While SQL is
away the journal grows; it is drained afterwards. Knows postings, not how they were made.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, SQLAlchemyError, StatementError

from accounting import ledger, residency
from accounting.db import Database
from accounting.errors import AccountingError
from accounting.residency import Reading
from accounting.types import Posting, Usage, WitnessRecord
from gateway import journal_records, segments
from gateway.journal import Journal
from workers.protocol.journal import Kind, Record
from workers.protocol.messages import EngineAck, EngineRecord, EngineRecords, ResidencyReport

log = logging.getLogger(__name__)

MAX_RECORDS = 5_000
EVERY_S = 0.2
MAX_BACKOFF_S = 2.0
MAX_OUTAGE_S = 600.0
MAX_BACKLOG_BYTES = 1024**3
DROP_EVERY_S = 3600.0
DEAD_LETTERS = "dead-letters.jsonl"

T = TypeVar("T", Posting, WitnessRecord)


@dataclass(frozen=True)
class _Numbered:
    seq: int
    posting: Posting


class ShippingStopped(Exception):
    """SQL took no posting while the shipper was to stop."""


class Shipper:
    """`start()` begins, `close()` ships what is durable, as far as SQL takes it, and ends."""

    def __init__(
        self,
        journal: Journal,
        database: Database,
        slot: int,
        offset: int,
        *,
        max_outage_s: float = MAX_OUTAGE_S,
        max_backlog_bytes: int = MAX_BACKLOG_BYTES,
    ) -> None:
        self._journal = journal
        self._database = database
        self._slot = slot
        self._offset = offset
        self._num_posted = 0
        self._max_outage_s = max_outage_s
        self._max_backlog_bytes = max_backlog_bytes
        self._reader = segments.Reader(journal.directory, offset)
        self._passed = offset
        self._advanced = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._failing_since: float | None = None
        self._backlog_bytes = 0
        self._drop_at = 0.0

    @property
    def offset(self) -> int:
        """The last record of the journal that SQL has."""
        return self._offset

    @property
    def num_posted(self) -> int:
        """Endings that this process brought into SQL and that were not there before."""
        return self._num_posted

    @property
    def is_full(self) -> bool:
        """Nothing more may be taken in: SQL has been away for 10 min, or 1 GiB waits for it."""
        if self._backlog_bytes > self._max_backlog_bytes:
            return True
        since = self._failing_since
        return since is not None and time.monotonic() - since > self._max_outage_s

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self, limit_s: float = 10.0) -> None:
        """A transaction under way is not cut off: what a cancelled driver leaves behind may block the next one."""
        self._stop.set()
        self._hurry.set()
        try:
            async with asyncio.timeout(limit_s):
                if self._task is not None:
                    await self._task
                # What was read and not posted is read again.
                self._reader = segments.Reader(self._journal.directory, self._offset)
                while await self.ship():
                    pass
        except (TimeoutError, ShippingStopped):
            log.warning(
                "journal is not shipped whole; the next process of slot %d goes on", self._slot
            )

    async def ship(self) -> int:
        """One transaction's worth. Returns how many records were read; 0: nothing durable is left to ship."""
        durable_seq, offset = self._journal.durable_seq, self._offset
        records = await asyncio.to_thread(self._reader.read, durable_seq, MAX_RECORDS)
        if not records:
            await self._pass(max(self._passed, durable_seq))
            return 0
        numbered = [
            _Numbered(record.seq, posting)
            for record in records
            if record.kind in (Kind.SETTLE, Kind.VOID) and (posting := self._decode(record))
        ]
        if numbered:
            await self._until_posted(lambda: self._post(numbered, records[-1].seq))
        await self._pass(self._offset if self._offset < offset else records[-1].seq)
        return len(records)

    async def caught_up(self, *, soon: bool = False) -> None:
        """Returns when every ending that is durable now is in SQL, however long SQL is away. `soon`: nothing more is
        gathered meanwhile."""
        durable_seq = self._journal.durable_seq
        if soon:
            self._hurry.set()
        async with self._advanced:
            await self._advanced.wait_for(lambda: self._passed >= durable_seq)

    async def _pass(self, seq: int) -> None:
        async with self._advanced:
            self._passed = seq
            self._advanced.notify_all()

    async def keep(self, frame: EngineRecords | ResidencyReport) -> EngineAck | None:
        """What a worker told; its answer, if it waits for one. Raises ShippingStopped."""
        if isinstance(frame, EngineRecords):
            return await self.post_engine_records(frame)
        await self._note_residency(frame)
        return None

    async def _note_residency(self, report: ResidencyReport) -> None:
        """Once: the next report has the same sums, or higher ones."""
        readings = [
            Reading(one.hour, one.tenant, report.model, report.process, one.cache, one.pinned)
            for one in report.hours
        ]
        try:
            async with self._database.write() as conn:
                await residency.note(conn, readings)
        except (SQLAlchemyError, OSError) as failure:
            log.warning("residency is not noted: %s", failure)

    async def post_engine_records(self, frame: EngineRecords) -> EngineAck:
        """The workers' own counts; returns after the COMMIT, however long SQL is away. Raises ShippingStopped."""
        witnesses = [_witness(frame.worker, record) for record in frame.records]
        await self._until_posted(lambda: self._post_witnesses(witnesses))
        return EngineAck(frame.worker, max((w.seq for w in witnesses), default=0))

    async def _run(self) -> None:
        while not self._stop.is_set():
            try:
                num_records = await self.ship()
            except ShippingStopped:
                return
            if self._backlog_bytes:
                await self._measure_backlog()
            if num_records == 0:
                await self._drop_old()
            if num_records < MAX_RECORDS:  # a transaction costs as much as hundreds of its rows
                await self._wait(self._hurry, EVERY_S)
                self._hurry.clear()

    async def _pause(self, seconds: float) -> None:
        """Ends early when the shipper is to stop."""
        await self._wait(self._stop, seconds)

    async def _wait(self, event: asyncio.Event, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await event.wait()
        except TimeoutError:
            return

    async def _measure_backlog(self) -> None:
        self._backlog_bytes = await asyncio.to_thread(self._reader.num_bytes_ahead)

    async def _drop_old(self) -> None:
        if time.monotonic() >= self._drop_at:
            self._drop_at = time.monotonic() + DROP_EVERY_S
            await asyncio.to_thread(segments.drop_old, self._journal.directory, self._offset)

    async def _until_posted(self, post: Callable[[], Awaitable[None]]) -> None:
        """Repeats with jitter through outages, deadlocks and unknown COMMITs. Stopping: one try, then `ShippingStopped`."""
        backoff_s = EVERY_S
        while True:
            try:
                await post()
            except (SQLAlchemyError, OSError) as failure:
                if self._failing_since is None:
                    self._failing_since = time.monotonic()
                    log.warning("SQL takes no postings: %s", failure)
                await self._measure_backlog()
                if self._stop.is_set():
                    raise ShippingStopped from failure
                await self._pause(backoff_s * random.uniform(0.5, 1.0))
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
            else:
                self._failing_since = None
                return

    async def _post(self, numbered: Sequence[_Numbered], offset: int) -> None:
        """All in one transaction; if a row is at fault, halves, down to the one that is."""
        try:
            async with self._database.write() as conn:
                stored = await ledger.journal_offset(conn, self._slot) or 0
                if stored < self._offset:
                    self._rewind(stored)
                    return
                posted = await ledger.post(conn, self._slot, offset, [n.posting for n in numbered])
        except (SQLAlchemyError, AccountingError, OverflowError) as failure:
            if not _is_rows_fault(failure):
                raise
            if len(numbered) == 1:
                self._bury(msgspec.to_builtins(numbered[0].posting), numbered[0].seq, failure)
                return
            middle = len(numbered) // 2
            await self._post(numbered[:middle], numbered[middle - 1].seq)
            await self._post(numbered[middle:], offset)
            return
        self._offset = offset
        self._num_posted += posted.num_new

    async def _post_witnesses(self, witnesses: Sequence[WitnessRecord]) -> None:
        try:
            async with self._database.write() as conn:
                await ledger.post_engine_records(conn, witnesses)
        except (SQLAlchemyError, AccountingError, OverflowError) as failure:
            if not _is_rows_fault(failure):
                raise
            if len(witnesses) == 1:
                self._bury(msgspec.to_builtins(witnesses[0]), witnesses[0].seq, failure)
                return
            middle = len(witnesses) // 2
            await self._post_witnesses(witnesses[:middle])
            await self._post_witnesses(witnesses[middle:])

    def _rewind(self, stored: int) -> None:
        log.critical(
            "SQL went back from journal offset %d to %d: shipping again", self._offset, stored
        )
        self._offset = stored
        self._reader = segments.Reader(self._journal.directory, stored)

    def _decode(self, record: Record) -> Posting | None:
        try:
            return journal_records.posting(record.payload)
        except msgspec.DecodeError as failure:
            self._bury(record.payload.hex(), record.seq, failure)
            return None

    def _bury(self, what: object, seq: int, reason: Exception) -> None:
        """What SQL will never take is kept beside the journal, for a person."""
        log.critical("journal record %d cannot be posted: %s", seq, reason)
        line = json.dumps({"seq": seq, "reason": str(reason), "record": what}) + "\n"
        path = self._journal.directory / DEAD_LETTERS
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, line.encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _is_rows_fault(failure: Exception) -> bool:
    """True: repeating cannot help, this very row is refused. A statement that never reached the driver counts."""
    if isinstance(failure, DBAPIError):
        return isinstance(failure, DataError | IntegrityError)
    return isinstance(failure, StatementError | AccountingError | OverflowError)


def _witness(worker: str, record: EngineRecord) -> WitnessRecord:
    usage = record.usage
    return WitnessRecord(
        worker=worker,
        seq=record.seq,
        request_id=record.request_id,
        attempt=record.attempt,
        tenant_id=record.tenant,
        root=record.root,
        usage=Usage(usage.cache_read, usage.cache_write, usage.uncached, usage.output),
        speculated=usage.speculated,
        recomputed=usage.recomputed,
        reason=record.reason,
    )
