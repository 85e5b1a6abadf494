"""The only writer of the endings of requests, of engine records and of journal offsets.

Everything is idempotent by primary key: a repeated call changes nothing and reports this. An ending and its engine
record may come in either order: the one that comes second finds the other and writes the difference off. The
consequences of an ending (rollups, budget alerts, events) are written in the same transaction. Every writer takes the
poster's turn first (`ledger.take_turn`). The module knows no frames and no HTTP.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Select, exists, func, select, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import aliased

from accounting.database.db import among_given, first_line, given, insert_all, insert_new, is_rows_fault
from accounting.events import outbox
from accounting.ledger import booking, ledger, rollups
from accounting.ledger.legs import reversal
from accounting.limits import end_users, limiter_state, spend
from accounting.requests import write_offs
from accounting.tables.invoice_models import Credit
from accounting.tables.models import BatchCharge, EngineRecordRow, JournalOffset, LedgerEntry
from accounting.upstreams import calls
from accounting.values.errors import AccountingError
from accounting.values.types import TOKEN_CLASSES, Charge, LedgerRow, Posting, Usage, WitnessRecord, WriteOffReason

log = logging.getLogger(__name__)

Records = Mapping[tuple[str, int], LedgerRow]
ENDINGS = ("settle", "void")
LOST_REASONS = ("worker_crash", "link_lost", "draining")
"""Reasons of engine records after which another worker may have gone on with the request."""
LOST_RECORD_MS = 86_400_000
"""How long the records of a lost worker may come after the endings of requests that another one went on with. Its host
may have to be started again, or its journal to be replayed.
"""

_SET_OFFSET = text(
    'INSERT INTO journal_offset (slot, "offset", posted_at_ms) VALUES (:slot, :offset, :posted_at_ms)'
    ' ON CONFLICT (slot) DO UPDATE SET "offset" = excluded."offset", posted_at_ms = excluded.posted_at_ms'
)


class JournalPlace(msgspec.Struct, frozen=True):
    """How far the journal of a gateway's slot is posted, and when that was."""

    slot: int
    offset: int
    posted_at_ms: int


async def post(
    conn: AsyncConnection, slot: int, offset: int, postings: Sequence[Posting], *, now_ms: int | None = None
) -> int:
    """Posts endings from one slot's journal, and the journal offset after them, in the caller's transaction. Returns
    the number of new rows: one that was posted before is no error."""
    now_ms = await ledger.take_turn(conn, now_ms)
    result = await _post(conn, postings, now_ms)
    await _set_offset(conn, slot, offset, now_ms)
    return result


async def post_unshipped(conn: AsyncConnection, postings: Sequence[Posting]) -> list[Posting]:
    """Posts endings that come from no journal: they are kept with a stored answer, or the journal takes none. A journal
    may hold them too; its offset is not changed. One whose row the database refuses is left out and logged: it must not
    keep an answer back for ever. Returns those that were refused."""
    now_ms = await ledger.take_turn(conn)
    try:
        async with conn.begin_nested():
            await _post(conn, postings, now_ms)
        return []
    except (SQLAlchemyError, AccountingError, OverflowError) as failure:
        if not is_rows_fault(failure):
            raise
        if len(postings) == 1:
            reason = first_line(failure) if isinstance(failure, SQLAlchemyError) else failure
            log.critical("the charge of request %s cannot be posted: %s", postings[0].request_id, reason)
            return list(postings)
        middle = len(postings) // 2
        return [*await post_unshipped(conn, postings[:middle]), *await post_unshipped(conn, postings[middle:])]


async def _post(conn: AsyncConnection, postings: Sequence[Posting], now_ms: int) -> int:
    # The first ending of a request in journal order counts. They are sorted, so that two posters cannot deadlock.
    first: dict[str, Posting] = {}
    for posting in postings:
        first.setdefault(posting.request_id, posting)
    endings = await _charge_lines_once(conn, sorted(first.values(), key=lambda p: p.request_id))
    columns = (LedgerEntry.request_id,)
    rows = [_entry(ending, now_ms) for ending in endings]
    new = {row.request_id for row in await insert_new(conn, LedgerEntry.__table__, rows, columns)}
    entries = [row for row in rows if row["request_id"] in new]
    await _book(conn, entries)
    await end_users.note(conn, [ending for ending in endings if ending.request_id in new])
    await calls.post(conn, [ending for ending in endings if ending.request_id in new], now_ms)
    settled = [row for row in entries if row["kind"] == "settle"]
    await rollups.add(conn, settled)
    await spend.note_alerts(conn, settled, now_ms)
    await outbox.write_usage(conn, settled)
    records = await _records_of(conn, new)
    met = {request_id for request_id, _ in records}
    _, earlier = _apart(await _by_request(conn, LedgerEntry, met))
    await _write_off(conn, entries, earlier, records, frozenset(records), now_ms)
    return len(new)


async def reverse(conn: AsyncConnection, request_ids: Collection[str], reason: WriteOffReason) -> list[str]:
    """Takes settled charges back: a reversal cancels the settle, and a write-off takes its tokens. This happens once
    per request. A request that is not settled is skipped, and so is one of which an operator has corrected anything: a
    reversal is of the whole charge, and would take that part back twice. Returns the requests that were reversed."""
    now_ms = await ledger.take_turn(conn)
    corrected = await _corrected(conn, request_ids)
    settled = [
        e for e in await _endings_of(conn, request_ids) if e["kind"] == "settle" and e["request_id"] not in corrected
    ]
    reversals = [reversal(entry, reason, now_ms) for entry in settled]
    columns = (LedgerEntry.request_id,)
    new = {row.request_id for row in await insert_new(conn, LedgerEntry.__table__, reversals, columns)}
    taken_back = [row for row in reversals if row["request_id"] in new]
    lost = [write_offs.taken_over(e, reason, now_ms) for e in settled if e["request_id"] in new]
    await insert_all(conn, LedgerEntry.__table__, lost)
    await _book(conn, [*taken_back, *lost])
    await rollups.add(conn, taken_back)
    await limiter_state.raise_for_reversals(conn, taken_back, now_ms)
    await outbox.write_usage(conn, taken_back)
    return [request_id for request_id in request_ids if request_id in new]


async def post_engine_records(
    conn: AsyncConnection, records: Sequence[WitnessRecord], *, now_ms: int | None = None
) -> int:
    """Posts the token counts of workers. A record whose request has no ending yet waits for it. Returns the number of
    new rows."""
    now_ms = await ledger.take_turn(conn, now_ms)
    rows = [_record(record, now_ms) for record in sorted(records, key=lambda r: (r.request_id, r.attempt))]
    columns = (EngineRecordRow.request_id, EngineRecordRow.attempt)
    new = {(row.request_id, row.attempt) for row in await insert_new(conn, EngineRecordRow.__table__, rows, columns)}
    request_ids = {request_id for request_id, _ in new}
    endings, earlier = _apart(await _by_request(conn, LedgerEntry, request_ids))
    await _write_off(conn, endings, earlier, await _records_of(conn, request_ids), new, now_ms)
    return len(new)


async def journal_offset(conn: AsyncConnection, slot: int) -> int | None:
    """Returns the offset at which the shipper of that slot continues, or None if nothing of it was ever posted."""
    return await conn.scalar(select(JournalOffset.offset).where(JournalOffset.slot == slot))


async def journal_offsets(conn: AsyncConnection) -> list[JournalPlace]:
    """Returns how far the journal of each slot is posted, by slot."""
    table = JournalOffset
    rows = await conn.execute(select(table.slot, table.offset, table.posted_at_ms).order_by(table.slot))
    return [JournalPlace(row.slot, row.offset, row.posted_at_ms) for row in rows]


async def endings(conn: AsyncConnection, request_ids: Collection[str]) -> dict[str, LedgerRow]:
    """Returns the settle or void of each request that has one."""
    return {row["request_id"]: row for row in await _endings_of(conn, request_ids)}


class Unsettled(NamedTuple):
    """A request that an engine worked on and that has no ending."""

    request_id: str
    tenant_id: str
    root: str
    posted_at_ms: int
    """Milliseconds at which its last engine record was posted."""


async def unended(conn: AsyncConnection) -> list[Unsettled]:
    """Returns requests without an ending: running ones, those whose ending is not shipped yet, and those whose journal
    is lost. O(engine records)."""
    record = EngineRecordRow
    ended = exists().where(LedgerEntry.request_id == record.request_id, LedgerEntry.kind.in_(ENDINGS))
    groups = (record.request_id, record.tenant_id, record.root)
    query = select(*groups, func.max(record.posted_at_ms)).where(~ended).group_by(*groups)
    return [Unsettled(*row) for row in await conn.execute(query.order_by(record.request_id))]


async def unwitnessed(conn: AsyncConnection, since_ms: int) -> frozenset[str]:
    """Returns requests whose ending was posted at `since_ms` or later and that have no engine record, or only those of
    workers that did not bring it to its end.
    """
    ending, record = LedgerEntry, EngineRecordRow
    recent = select(ending.request_id).where(ending.kind.in_(ENDINGS), ending.posted_at_ms >= since_ms)
    ended = exists().where(record.request_id == ending.request_id, record.reason.not_in(LOST_REASONS))
    return frozenset(await conn.scalars(recent.where(~ended)))


async def half_witnessed(conn: AsyncConnection, since_ms: int, until_ms: int) -> frozenset[str]:
    """Returns requests whose ending was posted in [since, until) and whose records may be in the journal of a lost worker.
    Another worker went on with them, and the record of the one before has not come; or they were settled by what the
    gateway had received of a lost worker.
    """
    later, earlier, ending = aliased(EngineRecordRow), aliased(EngineRecordRow), LedgerEntry
    ended = (ending.kind.in_(ENDINGS), ending.posted_at_ms >= since_ms, ending.posted_at_ms < until_ms)
    is_there = exists().where(earlier.request_id == later.request_id, earlier.attempt == later.attempt - 1)
    resumed = select(later.request_id).where(
        later.attempt > 0, ~is_there, later.request_id.in_(select(ending.request_id).where(*ended))
    )
    counted = select(func.sum(later.output)).where(later.request_id == ending.request_id).scalar_subquery()
    by_gateway = select(ending.request_id).where(
        *ended, ending.kind == "settle", ending.write_off == "worker_crash", func.coalesce(counted, -1) < ending.output
    )
    return frozenset([*await conn.scalars(resumed), *await conn.scalars(by_gateway)])


async def _charge_lines_once(conn: AsyncConnection, endings: list[Posting]) -> list[Posting]:
    """Makes this ending a void if another request has paid for its batch line, so that its tokens are written off."""
    lines = {(p.batch_id, p.line_no) for p in endings if _is_line(p)}
    if not lines:
        return endings
    paid: dict[tuple[str, int], str] = {}
    query = select(BatchCharge.__table__).where(
        BatchCharge.batch_id.in_({batch_id for batch_id, _ in lines}),
        BatchCharge.line_no.in_({line_no for _, line_no in lines}),
    )
    for row in await conn.execute(query):
        paid[(row.batch_id, row.line_no)] = row.request_id
    return [_second_is_void(ending, paid) for ending in endings]


def _is_line(posting: Posting) -> bool:
    return posting.kind == "settle" and posting.batch_id is not None and posting.line_no is not None


def _second_is_void(ending: Posting, paid: dict[tuple[str, int], str]) -> Posting:
    if not _is_line(ending):
        return ending
    assert ending.batch_id is not None
    assert ending.line_no is not None
    payer = paid.setdefault((ending.batch_id, ending.line_no), ending.request_id)
    if payer == ending.request_id:
        return ending
    return msgspec.structs.replace(
        ending, kind="void", usage=Usage(), charge=Charge(0, 0, 0, 0, 0), write_off="batch_retry"
    )


async def _book(conn: AsyncConnection, entries: Sequence[LedgerRow]) -> None:
    """Writes the legs of new entries, and the one charge of their batch lines."""
    await booking.book(conn, entries)
    lines = [
        {"batch_id": entry["batch_id"], "line_no": entry["line_no"], "request_id": entry["request_id"]}
        for entry in entries
        if entry["kind"] == "settle" and entry["batch_id"] is not None and entry["line_no"] is not None
    ]
    await insert_all(conn, BatchCharge.__table__, lines)


async def _write_off(
    conn: AsyncConnection,
    endings: Sequence[LedgerRow],
    earlier: Sequence[LedgerRow],
    records: Records,
    new_records: Collection[tuple[str, int]],
    now_ms: int,
) -> None:
    """Writes off what the engine computed beyond these endings. `earlier` has their present write-offs."""
    with_records = {request_id for request_id, _ in records}
    met = [ending for ending in endings if ending["request_id"] in with_records]
    if not met:
        return
    written: dict[str, list[LedgerRow]] = {}
    for row in earlier:
        written.setdefault(row["request_id"], []).append(row)
    by_request: dict[str, list[LedgerRow]] = {}
    for record in records.values():
        by_request.setdefault(record["request_id"], []).append(record)
    rows = [
        row
        for ending in met
        for row in write_offs.rows(
            ending, by_request[ending["request_id"]], written.get(ending["request_id"], []), new_records, now_ms
        )
    ]
    await insert_all(conn, LedgerEntry.__table__, rows)
    await _book(conn, rows)


async def _records_of(conn: AsyncConnection, request_ids: Collection[str]) -> Records:
    rows = await _by_request(conn, EngineRecordRow, request_ids)
    return {(row["request_id"], row["attempt"]): row for row in rows}


async def _endings_of(conn: AsyncConnection, request_ids: Collection[str]) -> list[LedgerRow]:
    return _apart(await _by_request(conn, LedgerEntry, request_ids))[0]


async def _corrected(conn: AsyncConnection, request_ids: Collection[str]) -> set[str]:
    """Returns those of the requests that a credit note or an adjustment corrects."""
    column = Credit.corrects_request_id
    query = select(column).where(among_given(conn.dialect.name, column))
    return {str(request_id) for request_id in (await conn.execute(query, given(conn, request_ids))).scalars()}


def _apart(entries: Iterable[LedgerRow]) -> tuple[list[LedgerRow], list[LedgerRow]]:
    """Returns the endings, and all other entries, which write off or take back."""
    endings: list[LedgerRow] = []
    others: list[LedgerRow] = []
    for entry in entries:
        (endings if entry["kind"] in ENDINGS else others).append(entry)
    return endings, others


async def _by_request(
    conn: AsyncConnection, table: type[LedgerEntry] | type[EngineRecordRow], request_ids: Collection[str]
) -> list[LedgerRow]:
    if not request_ids:
        return []
    query = _of_requests(conn.dialect.name, table)
    return list((await conn.execute(query, given(conn, request_ids))).mappings())


@cache
def _of_requests(dialect: str, table: type[LedgerEntry] | type[EngineRecordRow]) -> Select[Any]:
    return select(table.__table__).where(among_given(dialect, table.request_id))


async def _set_offset(conn: AsyncConnection, slot: int, offset: int, now_ms: int) -> None:
    await conn.execute(_SET_OFFSET, {"slot": slot, "offset": offset, "posted_at_ms": now_ms})


def _entry(posting: Posting, now_ms: int) -> dict[str, Any]:
    fields, usage, amount = msgspec.structs.asdict(posting), posting.usage, posting.charge
    return {
        **{name: fields[name] for name in _FROM_POSTING},
        **{name: getattr(usage, name) for name in TOKEN_CLASSES},
        **{f"charge_{name}": getattr(amount, name) for name in TOKEN_CLASSES},
        "charge": amount.total,
        "attempt": 0,
        "speculated": 0,
        "recomputed": 0,
        "posted_at_ms": now_ms,
    }


def _record(record: WitnessRecord, now_ms: int) -> dict[str, Any]:
    fields = msgspec.structs.asdict(record)
    usage = fields.pop("usage")
    return {**fields, **{name: getattr(usage, name) for name in TOKEN_CLASSES}, "posted_at_ms": now_ms}


_FROM_POSTING = sorted(set(LedgerEntry.__table__.columns.keys()) & set(Posting.__struct_fields__))
"""The columns that are fields of a posting, too."""
