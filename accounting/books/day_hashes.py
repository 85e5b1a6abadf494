"""Seals of UTC days: once a day is over, a hash is stored over the rows posted in it and over the seal before it.

A sealed day takes no more rows: the ledger posts nothing before the end of the last sealed day (`ledger.take_turn`).
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, and_, func, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.ledger import rollups
from accounting.tables.invoice_models import DaySeal
from accounting.tables.models import LedgerEntry, LedgerLeg
from accounting.values.periods import DAY_S

GRACE_S = 300
"""Seconds to wait after midnight, as the clocks of several machines differ."""
ROWS_AT_ONCE = 500
"""Rows that are hashed in one turn of the event loop: some 3 ms."""

# The columns are fixed by name: a column of a later version is no part of a seal.
ENTRY_COLUMNS = (
    "request_id",
    "kind",
    "attempt",
    "tenant_id",
    "key_id",
    "model",
    "root",
    "tier",
    "price_version",
    "currency",
    "outcome",
    "write_off",
    "opened_at_ms",
    "ended_at_ms",
    "posted_at_ms",
    "cache_read",
    "cache_write",
    "uncached",
    "output",
    "speculated",
    "recomputed",
    "charge",
    "charge_cache_read",
    "charge_cache_write",
    "charge_uncached",
    "charge_output",
    "reserved",
    "trace_id",
    "batch_id",
    "line_no",
)
LEG_COLUMNS = ("request_id", "kind", "attempt", "account", "unit", "token_class", "amount")
EVENT = ("request_id", "kind", "attempt")


class Draft(msgspec.Struct, frozen=True):
    """The seal of one day as one snapshot gives it. It is not written yet."""

    day: int
    previous: bytes
    """The hash of the seal before; empty for the first one."""
    num_entries: int
    hash: bytes
    has_wrong_rollups: bool


class Sealed(msgspec.Struct, frozen=True):
    day: int
    wrong_rollups: list[str]
    """Buckets whose sums had to be corrected. The list is empty unless Headgate itself made an error."""


async def draft(conn: AsyncConnection, now_ms: int) -> Draft | None:
    """Returns the seal of the oldest day that is over and not sealed, or None if there is no such day. This reads the
    whole day, so the caller gives a snapshot and holds up no writer."""
    last = await _last(conn)
    day = await _next_day(conn, last)
    if day is None or not _is_over(day, now_ms):
        return None
    previous = b"" if last is None else last.hash
    num_entries, digest = await _digest(conn, day, previous)
    return Draft(day, previous, num_entries, digest, await rollups.any_differs(conn, *_rollups_of(day)))


async def seal(conn: AsyncConnection, found: Draft, now_ms: int) -> Sealed | None:
    """Seals the day of the draft, or returns None if the draft does not hold any more: another gateway has sealed the
    day, or a row was posted into it. Rows are only added, so equal numbers mean equal rows. The caller holds the
    poster's turn (`ledger.take_turn`), and nothing is read but the day's index and its wrong sums."""
    last = await _last(conn)
    if (b"" if last is None else last.hash) != found.previous or await _num_posted(
        conn, found.day
    ) != found.num_entries:
        return None
    wrong = await rollups.recompute(conn, *_rollups_of(found.day)) if found.has_wrong_rollups else []
    values = {"day": found.day, "num_entries": found.num_entries, "hash": found.hash, "sealed_at_ms": now_ms}
    await conn.execute(insert(DaySeal).values(**values))
    return Sealed(found.day, wrong)


async def broken(conn: AsyncConnection) -> tuple[int, list[str]]:
    """Returns the number of sealed days, and a text for each day whose rows or predecessor differ from the seal."""
    seals = (await conn.execute(select(DaySeal.__table__).order_by(DaySeal.day))).all()
    failures: list[str] = []
    previous, expected_day = b"", None
    for seal in seals:
        if expected_day not in (None, seal.day):
            failures.append(f"day {expected_day}: not sealed")
        num_entries, digest = await _digest(conn, seal.day, previous)
        if (num_entries, digest) != (seal.num_entries, seal.hash):
            failures.append(f"day {seal.day}: {num_entries} rows, {seal.num_entries} were sealed")
        previous, expected_day = seal.hash, seal.day + DAY_S
    return len(seals), failures


async def _last(conn: AsyncConnection) -> Any:
    query = select(DaySeal.__table__).order_by(DaySeal.day.desc()).limit(1)
    return (await conn.execute(query)).first()


async def _next_day(conn: AsyncConnection, last: Any) -> int | None:
    """Returns the first day that is not sealed, or None if nothing was ever posted."""
    if last is not None:
        return int(last.day) + DAY_S
    first_ms = await conn.scalar(select(func.min(LedgerEntry.posted_at_ms)))
    return None if first_ms is None else first_ms // 1000 // DAY_S * DAY_S


def _rollups_of(day: int) -> tuple[int, int]:
    """Returns the time whose sums the day's rows are in. A request that began the day before may have ended today."""
    return day - DAY_S, day + DAY_S


def _posted_on(day: int) -> ColumnElement[bool]:
    return and_(LedgerEntry.posted_at_ms >= day * 1000, LedgerEntry.posted_at_ms < (day + DAY_S) * 1000)


async def _num_posted(conn: AsyncConnection, day: int) -> int:
    return await conn.scalar(select(func.count()).select_from(LedgerEntry).where(_posted_on(day))) or 0


def _is_over(day: int, now_ms: int) -> bool:
    return (day + DAY_S + GRACE_S) * 1000 <= now_ms


async def _digest(conn: AsyncConnection, day: int, previous: bytes) -> tuple[int, bytes]:
    """Hashes rows and legs in the order of their keys' bytes, so that the database's collation does not matter."""
    whole = sha256(previous + str(day).encode())
    posted = _posted_on(day)
    entries = select(*(getattr(LedgerEntry, name) for name in ENTRY_COLUMNS)).where(posted)
    entries = entries.order_by(*(_bytewise(conn, LedgerEntry, name) for name in EVENT))
    num_entries = await _add(conn, whole, entries)
    same_event = and_(*(getattr(LedgerLeg, name) == getattr(LedgerEntry, name) for name in EVENT))
    legs = select(*(getattr(LedgerLeg, name) for name in LEG_COLUMNS)).join(LedgerEntry, same_event)
    legs = legs.where(posted).order_by(*(_bytewise(conn, LedgerLeg, name) for name in LEG_COLUMNS[:-1]))
    await _add(conn, whole, legs)
    return num_entries, whole.digest()


async def _add(conn: AsyncConnection, whole: Any, query: Any) -> int:
    num_rows = 0
    async with conn.stream(query.execution_options(yield_per=ROWS_AT_ONCE)) as rows:
        async for row in rows:
            whole.update(msgspec.json.encode(tuple(row)))
            num_rows += 1
    whole.update(str(num_rows).encode())
    return num_rows


def _bytewise(conn: AsyncConnection, table: Any, name: str) -> ColumnElement[Any]:
    column: ColumnElement[Any] = getattr(table, name)
    if name == "attempt" or conn.dialect.name == "sqlite":
        return column
    return column.collate("C")
