"""Posts the records of one slot's journal to SQL. The offset moves in the same transaction.

A record is posted once, whatever SQL does. After an unknown COMMIT the same records are sent again, and their primary
key identifies them. If a database lost its latest transactions, it lost the offset's change with them, and the journal
is read again from there. The poster repeats nothing by itself: the caller repeats a call that raises. It knows neither
when to post nor who waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from accounting.billing import residency
from accounting.billing.residency import Reading
from accounting.database.db import Database
from accounting.requests import request_postings
from accounting.values.types import Posting
from gateway.journal import engine_records, journal_records
from gateway.journal.dead_letters import bury, post_all
from gateway.journal.reader import Reader
from workers.protocol.counts import EngineAck, EngineRecords, ResidencyReport
from workers.protocol.journal import Kind, Record

log = logging.getLogger(__name__)

MAX_RECORDS = 5_000


class Posted(msgspec.Struct, frozen=True, tag=True):
    """The result of one call of `post`."""

    num_records: int
    """The number of records read from the journal; 0 means that nothing durable is left."""
    num_endings: int
    """The number of endings among them; 0 means that SQL was not asked."""
    passed: int
    """Every ending up to this record is in SQL."""
    offset: int
    """The last record of the journal that SQL knows of."""
    num_new: int
    """The number of endings that were not in SQL before."""
    num_refused: int = 0
    """The number of endings that SQL will never take. They are among the dead letters."""


class Posts(Protocol):
    """A poster, in this process or in another one. Every call raises SQLAlchemyError or OSError if SQL
    does not answer.
    """

    @property
    def offset(self) -> int:
        """The last record of the journal that SQL has."""

    async def post(self, durable_seq: int) -> Posted:
        """Posts one transaction's worth of records, none of them beyond `durable_seq`."""

    async def post_engine_records(self, frame: EngineRecords) -> EngineAck:
        """Posts the workers' own counts; returns after the COMMIT."""

    async def note_residency(self, report: ResidencyReport) -> None: ...

    async def close(self) -> None:
        """Closes the poster. No call is under way, or the one under way is given up."""


@dataclass(frozen=True)
class _Ending:
    seq: int
    posting: Posting


@dataclass(frozen=True)
class _Taken:
    """Records that are read from the journal and not known to be in SQL."""

    num_records: int
    last_seq: int
    endings: Sequence[_Ending]


class Poster:
    """A poster in this process. One call of `post` runs at a time."""

    def __init__(self, directory: Path, database: Database, slot: int, offset: int) -> None:
        self._directory = directory
        self._database = database
        self._slot = slot
        self._offset = offset
        self._num_new = self._num_refused = 0
        self._buried: set[int] = set()
        """Sequence numbers of the endings of this read that SQL refused."""
        self._reader = Reader(directory, offset)
        self._read: list[Record] = []
        """Records that are read and not taken: one that cannot be decoded is not on the disk yet."""
        self._taken: _Taken | None = None

    @property
    def offset(self) -> int:
        return self._offset

    async def post(self, durable_seq: int) -> Posted:
        taken, offset = self._taken or await self._take(durable_seq), self._offset
        if taken.endings:
            self._taken = taken
            await post_all(
                taken.endings,
                lambda endings: self._post(endings, taken),
                lambda one, failure: self._bury(msgspec.to_builtins(one.posting), one.seq, failure),
            )
            self._taken = None
        self._buried.clear()
        num_new, num_refused = self._num_new, self._num_refused
        self._num_new = self._num_refused = 0
        passed = self._offset if self._offset < offset else taken.last_seq
        return Posted(taken.num_records, len(taken.endings), passed, self._offset, num_new, num_refused)

    async def post_engine_records(self, frame: EngineRecords) -> EngineAck:
        await engine_records.post(self._database, self._directory, frame)
        return EngineAck(frame.worker, max((record.seq for record in frame.records), default=0))

    async def note_residency(self, report: ResidencyReport) -> None:
        readings = [
            Reading(one.hour, one.tenant, report.model, report.process, one.cache, one.pinned) for one in report.hours
        ]
        async with self._database.write() as conn:
            await residency.note(conn, readings)

    async def close(self) -> None:
        """Does nothing: the database belongs to the caller."""

    async def _take(self, durable_seq: int) -> _Taken:
        if not self._read:
            self._read = await asyncio.to_thread(self._reader.read, durable_seq, MAX_RECORDS)
        records = self._read
        endings = [
            _Ending(record.seq, posting)
            for record in records
            if record.kind in (Kind.SETTLE, Kind.VOID) and (posting := self._decode(record))
        ]
        self._read = []
        return _Taken(len(records), records[-1].seq if records else durable_seq, endings)

    async def _post(self, endings: Sequence[_Ending], taken: _Taken) -> None:
        """Posts endings of what was taken, in one transaction."""
        last = endings[-1]
        offset = taken.last_seq if last is taken.endings[-1] else last.seq
        async with self._database.write() as conn:
            stored = await request_postings.journal_offset(conn, self._slot) or 0
            if stored < self._offset:
                self._rewind(stored)
                return
            postings = [ending.posting for ending in endings]
            num_new = await request_postings.post(conn, self._slot, offset, postings)
        self._offset = offset
        self._num_new += num_new

    def _rewind(self, stored: int) -> None:
        log.critical(
            "SQL went back from journal offset %d to %d: shipping again; `headgate journals replay` on each worker's host"
            " brings engine records back",
            self._offset,
            stored,
        )
        self._offset = stored
        self._reader = Reader(self._directory, stored)

    def _decode(self, record: Record) -> Posting | None:
        try:
            return journal_records.posting(record.payload)
        except msgspec.DecodeError as failure:
            self._bury(record.payload.hex(), record.seq, failure)
            return None

    def _bury(self, what: object, seq: int, reason: Exception) -> None:
        bury(self._directory, what, seq, reason)
        if seq not in self._buried:  # it comes again where SQL went away in the middle of a read
            self._buried.add(seq)
            self._num_refused += 1
