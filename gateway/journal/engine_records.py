"""The way of engine records into SQL: those that a worker sends, and those that the journals of workers still have.

A worker forgets a record that SQL has acknowledged. Its journal keeps it for a while: `post_kept` brings it back where
SQL has lost its latest transactions, as after a failover.

A backup reads the journals after the database, so they are newer. A worker that started on such a journal would take
records for acknowledged that the restored database does not have, and would tell of requests that began after the
gateways' journals were read. So a restore posts what the journals hold, and workers begin new ones.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from accounting.database.db import Database
from accounting.requests import request_postings
from accounting.values.types import Usage, WitnessRecord
from gateway.journal.dead_letters import bury, post_all
from gateway.journal.journals import gateway_journals, worker_journals
from gateway.journal.unshipped import scans, unshipped
from workers.protocol.counts import EngineRecord, EngineRecords
from workers.protocol.engine_journal import Replay, replay
from workers.protocol.journal import Kind
from workers.protocol.segments import SlotTaken, list_segments, recover, take_slot

AT_ONCE = 1000
"""Records of a journal in one transaction."""


class Kept(NamedTuple):
    """The outcome of posting the records that a worker's journal still has."""

    num_new: int
    """The number of records that SQL did not have."""
    num_left_out: int
    """The number of records whose requests nobody knows."""
    is_owned: bool
    """A living worker owns the journal. What runs there is left to it."""


async def post(database: Database, directory: Path, frame: EngineRecords) -> int:
    """Posts the records of one worker, and returns the number of those that SQL did not have. One that SQL will never
    take is kept in `directory`. Raises SQLAlchemyError, OSError.
    """
    num_new = 0

    async def post_some(witnesses: Sequence[WitnessRecord]) -> None:
        nonlocal num_new
        async with database.write() as conn:
            num_posted = await request_postings.post_engine_records(conn, witnesses)
        num_new += num_posted

    await post_all(
        [_witness(frame.worker, record) for record in frame.records],
        post_some,
        lambda one, failure: bury(directory, msgspec.to_builtins(one), one.seq, failure),
    )
    return num_new


async def post_kept(database: Database, gateways: Mapping[int, Path], worker: str, directory: Path) -> Kept:
    """Posts what a worker's journal still has, acknowledged or not, and leaves the journal as it is. The worker may
    run. Raises SQLAlchemyError, OSError.

    Records of requests that neither SQL nor the journals of `gateways` know are left out: nobody could end such a
    request. They are not lost, because the journal still has them when their requests have ended.
    """
    # The records are read first: a request of theirs is in a gateway's journal by then, or in SQL.
    records, is_owned = await asyncio.to_thread(_kept, directory)
    waiting, _ = await _waiting(database, gateways)
    num_new, num_left_out = await _post_known(database, worker, directory, records, waiting)
    return Kept(num_new, num_left_out, is_owned)


async def post_restored(database: Database, state_dir: Path) -> None:
    """Posts what the journals of a restored home's workers hold, and removes these journals. No worker may run. Raises
    SQLAlchemyError, OSError.

    Requests that neither SQL nor a gateway's journal knows began after the backup. Their records are left out, unless
    SQL names gateways whose journals are not here: such a request may be theirs.
    """
    journals = gateway_journals(state_dir)
    waiting, knows_all = await _waiting(database, journals)
    for worker, directory in sorted(worker_journals(state_dir).items()):
        records = await asyncio.to_thread(_records_of, directory)
        await _post_known(database, worker, directory, records, waiting if knows_all else None)
        for segment in list_segments(directory):
            segment.path.unlink()


async def _post_known(
    database: Database, worker: str, directory: Path, records: Sequence[EngineRecord], waiting: frozenset[str] | None
) -> tuple[int, int]:
    """Posts the records whose requests are `waiting` or have ended in SQL, or all if `waiting` is None. Returns the
    number of those that SQL did not have, and of those that were left out.
    """
    num_new = num_left_out = 0
    for start in range(0, len(records), AT_ONCE):
        known = some = records[start : start + AT_ONCE]
        if waiting is not None:
            ended = await _ended(database, some)
            known = [record for record in some if record.request_id in waiting or record.request_id in ended]
        num_new += await post(database, directory, EngineRecords(worker, tuple(known)))
        num_left_out += len(some) - len(known)
    return num_new, num_left_out


async def _waiting(database: Database, journals: Mapping[int, Path]) -> tuple[frozenset[str], bool]:
    """Returns the requests that run or ended in these journals and are not in SQL, and whether SQL names no other
    gateway.
    """
    async with database.read() as conn:
        places = {place.slot: place.offset for place in await request_postings.journal_offsets(conn)}
    left = [await asyncio.to_thread(unshipped, path, places.get(slot, 0)) for slot, path in journals.items()]
    return frozenset().union(*(one.requests for one in left)), places.keys() <= journals.keys()


async def _ended(database: Database, records: Sequence[EngineRecord]) -> frozenset[str]:
    async with database.read() as conn:
        return frozenset(await request_postings.endings(conn, [record.request_id for record in records]))


def _kept(directory: Path) -> tuple[list[EngineRecord], bool]:
    """Returns the records of a journal, and whether a living worker owns it. Then only attempts that ended are among
    them, and nothing is repaired.
    """
    try:
        lock = take_slot(directory)
    except SlotTaken:
        return _ended_in(directory), True
    try:
        crashed = _crashed_in(directory)
    finally:
        os.close(lock)  # its worker may want to start
    return [*_ended_in(directory), *crashed], False


def _records_of(directory: Path) -> list[EngineRecord]:
    """Returns a record for each attempt of a journal that nobody owns, acknowledged or not. One that ran ends with its
    last counts, as if its process had been killed. Damaged segments are set aside; the others' beginnings stand.
    """
    crashed = _crashed_in(directory)  # it repairs the segments that are read next
    return [*_ended_in(directory), *crashed]


def _crashed_in(directory: Path) -> list[EngineRecord]:
    """Returns a record for each attempt that ran when its process was killed, in a journal that nobody owns. Damaged
    segments are set aside.
    """
    left = replay(recover(directory))
    return [left.crashed(number, 0) for number in left.open]


def _ended_in(directory: Path) -> list[EngineRecord]:
    """Returns a record for each attempt that ended. It only reads."""
    found: dict[tuple[str, int], EngineRecord] = {}
    for segment in list_segments(directory):
        with suppress(FileNotFoundError):  # its worker deletes the oldest segments
            for part in scans(segment.path):
                state = Replay(record for record in part.records if record.kind == Kind.ENDED)
                found |= {(record.request_id, record.attempt): record for record in state.unacked.values()}
    return list(found.values())


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
