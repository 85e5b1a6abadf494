"""Rows for other programs: the ledger, usage by day, FOCUS 1.2. Rows come in keyset pages, and each page is read in its
own snapshot.

A page goes on after the last row of the page before, so an export of any size holds one page in memory. Integers stay
integers. The order of columns is part of `SCHEMA_VERSION`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from sqlalchemy import BigInteger, Select, and_, case, or_, select
from sqlalchemy.sql.elements import ColumnElement

from accounting.database.db import Database
from accounting.ledger.rollups import KEYS, SUMS
from accounting.tables.models import LedgerEntry, RollupDay
from accounting.values.progress import Told, nobody

SCHEMA_VERSION = "1"
PAGE_ROWS = 5_000

LEDGER_COLUMNS = tuple(column.name for column in LedgerEntry.__table__.columns)
USAGE_COLUMNS = ("bucket", *KEYS, "num_requests", *SUMS)
INTEGERS = frozenset(column.name for column in LedgerEntry.__table__.columns if isinstance(column.type, BigInteger)) | {
    "bucket",
    "num_requests",
}
_LEDGER_KEY = ("opened_at_ms", "request_id", "kind", "attempt")
_USAGE_KEY = ("bucket", *KEYS)


async def ledger_rows(
    database: Database, start: int, end: int, page_rows: int = PAGE_ROWS, told: Told = nobody
) -> AsyncIterator[list[Any]]:
    """Yields pages of ledger rows whose request began in [start, end) (Unix seconds), oldest first. `write_off` is empty
    but in rows that write off. `told` hears how much of the range is behind."""
    table = LedgerEntry.__table__.c
    # An ending's column names a reason whether or not anything is left to be written off under it.
    reason = case((table.write_off == table.kind, table.write_off), else_="").label("write_off")
    query = select(*(reason if name == "write_off" else table[name] for name in LEDGER_COLUMNS))
    query = query.where(table.opened_at_ms >= start * 1000, table.opened_at_ms < end * 1000)
    async for page in _pages(database, query, [table[name] for name in _LEDGER_KEY], page_rows):
        yield page
        told(page[-1].opened_at_ms // 1000 - start, end - start)


async def usage_rows(
    database: Database, start: int, end: int, page_rows: int = PAGE_ROWS, told: Told = nobody
) -> AsyncIterator[list[Any]]:
    """Yields pages of day sums, oldest first. `told` hears how much of the range is behind."""
    table = RollupDay.__table__.c
    query = select(*(table[name] for name in USAGE_COLUMNS)).where(table.bucket >= start, table.bucket < end)
    async for page in _pages(database, query, [table[name] for name in _USAGE_KEY], page_rows):
        yield page
        told(page[-1].bucket - start, end - start)


async def _pages(
    database: Database, query: Select[Any], key: list[ColumnElement[Any]], page_rows: int
) -> AsyncIterator[list[Any]]:
    last: Any = None
    while True:
        following = query if last is None else query.where(_behind(key, last))
        async with database.read() as conn:
            page = (await conn.execute(following.order_by(*key).limit(page_rows))).all()
        if page:
            yield list(page)
        if len(page) < page_rows:
            return
        last = [page[-1]._mapping[column.key] for column in key]


def _behind(key: list[ColumnElement[Any]], last: list[Any]) -> ColumnElement[bool]:
    """Returns the condition that a row comes after `last`. The first column bounds the range by an index; the other
    columns decide among rows with the same first value."""
    first, *rest = key
    deciding: ColumnElement[bool] = rest[-1] > last[-1]
    for column, value in reversed(list(zip(rest[:-1], last[1:-1], strict=True))):
        deciding = or_(column > value, and_(column == value, deciding))
    return and_(first >= last[0], or_(first > last[0], deciding))
