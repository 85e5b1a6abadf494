"""The way of engine records into SQL: those that a worker sends, and those that a restored backup has in the journals
of its workers.

A backup reads the journals after the database, so they are newer. A worker that started on such a journal would take
records for acknowledged that the restored database does not have, and would tell of requests that began after the
gateways' journals were read. So a restore posts what the journals hold, and workers begin new ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from accounting.database.db import Database
from accounting.requests import request_postings
from accounting.values.types import Usage, WitnessRecord
from gateway.journal.dead_letters import bury, post_all
from gateway.journal.journals import gateway_journals, worker_journals
from gateway.journal.unshipped import unshipped
from workers.protocol.counts import EngineRecord, EngineRecords
from workers.protocol.engine_journal import Replay, replay
from workers.protocol.journal import Kind, scan
from workers.protocol.segments import list_segments, recover

AT_ONCE = 1000
"""Records in one transaction of a restore."""


async def post(database: Database, directory: Path, frame: EngineRecords) -> None:
    """Posts the records of one worker. One that SQL will never take is kept in `directory`. Raises SQLAlchemyError,
    OSError.
    """

    async def post_some(witnesses: Sequence[WitnessRecord]) -> None:
        async with database.write() as conn:
            await request_postings.post_engine_records(conn, witnesses)

    await post_all(
        [_witness(frame.worker, record) for record in frame.records],
        post_some,
        lambda one, failure: bury(directory, msgspec.to_builtins(one), one.seq, failure),
    )


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
        for start in range(0, len(records), AT_ONCE):
            some = records[start : start + AT_ONCE]
            if knows_all:
                ended = await _ended(database, some)
                some = [record for record in some if record.request_id in waiting or record.request_id in ended]
            await post(database, directory, EngineRecords(worker, tuple(some)))
        for segment in list_segments(directory):
            segment.path.unlink()


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


def _records_of(directory: Path) -> list[EngineRecord]:
    """Returns a record for each attempt of a journal, acknowledged or not. One that ran ends with its last counts, as
    if its process had been killed. Damaged segments are set aside; the others' beginnings stand.
    """
    left = replay(recover(directory))
    found: dict[tuple[str, int], EngineRecord] = {}
    for segment in list_segments(directory):
        records = scan(segment.path.read_bytes()).records
        state = Replay(record for record in records if record.kind == Kind.ENDED)
        found |= {(record.request_id, record.attempt): record for record in state.unacked.values()}
    crashed = [left.crashed(number, 0) for number in left.open]
    return [*found.values(), *crashed]


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
