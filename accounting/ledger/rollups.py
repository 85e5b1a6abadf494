"""Sums by minute, hour, day and month, written in the transaction of the rows they sum. Usage reports read only these
sums.

When a day is sealed its buckets are compared with the rows and computed anew if they differ (`recompute`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

from sqlalchemy import BigInteger, ColumnElement, Select, case, cast, delete, func, insert, or_, select, union_all
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database.db import add_up, among
from accounting.tables.invoice_models import RollupMonth
from accounting.tables.models import LedgerEntry, RollupDay, RollupHour, RollupMinute
from accounting.values.periods import DAY_S, month_start
from accounting.values.types import BILLED, OPERATOR_TENANT, TOKEN_CLASSES, LedgerRow, Tier, Usage

Width = Literal["1m", "1h", "1d"]
Span = Literal["1m", "1h", "1d", "month"]
TABLES: dict[Width, type[RollupMinute] | type[RollupHour] | type[RollupDay]] = {
    "1m": RollupMinute,
    "1h": RollupHour,
    "1d": RollupDay,
}
SECONDS: dict[Width, int] = {"1m": 60, "1h": 3_600, "1d": 86_400}
SPANS: tuple[Span, ...] = ("1m", "1h", "1d", "month")

KEYS = ("tenant_id", "key_id", "model", "tier", "price_version", "currency")
BUCKET_KEYS = ("bucket", *KEYS)
SUMS = (*TOKEN_CLASSES, "charge", *(f"charge_{name}" for name in TOKEN_CLASSES))
COUNTED = ("num_requests", *SUMS)


def table_of(span: Span) -> type[RollupMinute | RollupHour | RollupDay | RollupMonth]:
    return RollupMonth if span == "month" else TABLES[span]


async def add(conn: AsyncConnection, entries: Sequence[LedgerRow]) -> None:
    """Adds new settle entries, and subtracts reversals, in the buckets in which their requests began."""
    rows = summed(
        {
            **entry,
            "bucket": bucket_of("1m", entry["opened_at_ms"] // 1000),
            "num_requests": -1 if entry["kind"] == "reversal" else 1,
        }
        for entry in entries
    )
    for span in SPANS:
        rows = summed({**row, "bucket": bucket_of(span, row["bucket"])} for row in rows)
        await add_up(conn, table_of(span).__table__, rows, COUNTED)


class TenantSums(NamedTuple):
    """Requests of one tenant and their tokens."""

    tenant_id: str
    num_requests: int
    usage: Usage


async def by_tenant(
    conn: AsyncConnection, width: Width, start: int, *, tier: Tier | None = None, limit: int = 100
) -> list[TenantSums]:
    """Returns the sums of all buckets from the one of `start` on, of the tenants with most tokens; those first. The
    operator is not among them."""
    table = TABLES[width]
    sums = [cast(func.sum(getattr(table, name)), BigInteger).label(name) for name in TOKEN_CLASSES]
    num_requests = cast(func.sum(table.num_requests), BigInteger).label("num_requests")
    query = select(table.tenant_id, num_requests, *sums)
    query = query.where(table.bucket >= bucket_of(width, start), table.tenant_id != OPERATOR_TENANT)
    if tier is not None:
        query = query.where(table.tier == tier)
    total = func.sum(sum((getattr(table, name) for name in TOKEN_CLASSES[1:]), getattr(table, TOKEN_CLASSES[0])))
    query = query.group_by(table.tenant_id).order_by(total.desc(), table.tenant_id).limit(limit)
    return [
        TenantSums(row.tenant_id, row.num_requests, Usage(row.cache_read, row.cache_write, row.uncached, row.output))
        for row in await conn.execute(query)
    ]


async def tokens_of(conn: AsyncConnection, width: Width, start: int, tenant_ids: Collection[str]) -> dict[str, int]:
    """Returns the tokens of tenants in all buckets from the one of `start` on. A tenant without any is left out."""
    table = TABLES[width]
    tokens = func.sum(sum((getattr(table, name) for name in TOKEN_CLASSES[1:]), getattr(table, TOKEN_CLASSES[0])))
    query = select(table.tenant_id, cast(tokens, BigInteger)).where(table.bucket >= bucket_of(width, start))
    query = query.where(among(conn, table.tenant_id, tenant_ids)).group_by(table.tenant_id)
    return {tenant_id: int(number) for tenant_id, number in await conn.execute(query)}


def summed(rows: Iterable[LedgerRow]) -> list[dict[str, Any]]:
    """Returns one row per bucket and key, sorted by key so that all writers lock in the same order."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = tuple([row[name] for name in BUCKET_KEYS])
        sums = found.get(key)
        if sums is None:
            found[key] = {name: row[name] for name in (*BUCKET_KEYS, *COUNTED)}
            continue
        for name in COUNTED:
            sums[name] += row[name]
    return [found[key] for key in sorted(found)]


def bucket_of(span: Span, second: int) -> int:
    """Returns the first second of the bucket that `second` lies in."""
    return month_start(second) if span == "month" else second - second % SECONDS[span]


def covering(start: int, end: int) -> dict[Span, list[int]]:
    """Returns the buckets that together are [start, end), which is whole minutes. They are as large as can be, so that
    a year needs at most some two hundred."""
    found: dict[Span, list[int]] = {}
    while start < end:
        span = next(span for span in reversed(SPANS) if bucket_of(span, start) == start and _end(span, start) <= end)
        found.setdefault(span, []).append(start)
        start = _end(span, start)
    return found


def _end(span: Span, bucket: int) -> int:
    return month_start(bucket + 31 * DAY_S) if span == "month" else bucket + SECONDS[span]


def _whole(span: Span, start: int, end: int) -> tuple[int, int]:
    """Returns [start, end), which is whole days, or the months that it lies in."""
    return (month_start(start), _end("month", month_start(end - 1))) if span == "month" else (start, end)


def _source(conn: AsyncConnection, span: Span, start: int, end: int) -> Select[Any]:
    """Selects what the sums of a span in [start, end) are made of."""
    rows = _days_by_month(conn.dialect.name) if span == "month" else _rows_by_bucket(span)
    times, scale = (RollupDay.bucket, 1) if span == "month" else (LedgerEntry.opened_at_ms, 1000)
    return rows.where(times >= start * scale, times < end * scale)


def differing(conn: AsyncConnection, span: Span, start: int | None = None, end: int | None = None) -> Select[Any]:
    """Selects keys whose stored sums differ from the sums of their rows (for a month: of its days), in all buckets or
    in [start, end)."""
    if start is None or end is None:
        return all_differing(conn.dialect.name, span)
    bucket = table_of(span).bucket
    return _unequal(_source(conn, span, start, end), _negated(span).where(bucket >= start, bucket < end))


@cache
def all_differing(dialect: str, span: Span) -> Select[Any]:
    """Selects them in all buckets. The statement is made once."""
    return _unequal(_days_by_month(dialect) if span == "month" else _rows_by_bucket(span), _negated(span))


def _negated(span: Span) -> Select[Any]:
    stored = table_of(span)
    return select(
        stored.bucket,
        *(getattr(stored, name) for name in KEYS),
        *((-getattr(stored, name)).label(name) for name in ("num_requests", *SUMS)),
    )


def _unequal(source: Select[Any], negated: Select[Any]) -> Select[Any]:
    both = union_all(source, negated).subquery()
    keys = [both.c[name] for name in ("bucket", *KEYS)]
    wrong = or_(*(func.sum(both.c[name]) != 0 for name in ("num_requests", *SUMS)))
    return select(*keys).group_by(*keys).having(wrong)


async def any_differs(conn: AsyncConnection, start: int, end: int) -> bool:
    """Returns whether a minute, hour or day of [start, end), or a month of them, differs from its sums."""
    for span in SPANS:
        if (await conn.execute(differing(conn, span, *_whole(span, start, end)).limit(1))).first() is not None:
            return True
    return False


async def recompute(conn: AsyncConnection, start: int, end: int) -> list[str]:
    """Computes minutes, hours and days of [start, end), which are whole UTC days, anew from their rows, and their
    months from the days. Returns the wrong buckets."""
    found: list[str] = []
    for span in SPANS:
        first, last = _whole(span, start, end)
        wrong = (await conn.execute(differing(conn, span, first, last))).all()
        if not wrong:
            continue
        found += [f"{span} bucket {row.bucket}: {', '.join(map(str, row[1:]))}" for row in wrong]
        table = table_of(span)
        await conn.execute(delete(table).where(table.bucket >= first, table.bucket < last))
        each = _source(conn, span, first, last).subquery()
        keys = [each.c[name] for name in ("bucket", *KEYS)]
        sums = [func.sum(each.c[name]) for name in ("num_requests", *SUMS)]
        await conn.execute(
            insert(table).from_select(["bucket", *KEYS, "num_requests", *SUMS], select(*keys, *sums).group_by(*keys))
        )
    return found


def _rows_by_bucket(span: Width) -> Select[Any]:
    seconds = SECONDS[span]
    return select(
        ((LedgerEntry.opened_at_ms // (1000 * seconds)) * seconds).label("bucket"),
        *(getattr(LedgerEntry, name) for name in KEYS),
        case((LedgerEntry.kind == "settle", 1), else_=-1).label("num_requests"),
        *(getattr(LedgerEntry, name) for name in SUMS),
    ).where(LedgerEntry.kind.in_(BILLED))


def _days_by_month(dialect: str) -> Select[Any]:
    return select(
        _month(dialect, RollupDay.bucket).label("bucket"),
        *(getattr(RollupDay, name) for name in (*KEYS, "num_requests", *SUMS)),
    )


def _month(dialect: str, second: Any) -> ColumnElement[int]:
    if dialect == "sqlite":
        return cast(func.strftime("%s", second, "unixepoch", "start of month"), BigInteger)
    utc = func.timezone("UTC", func.to_timestamp(second))
    return cast(func.date_part("epoch", func.date_trunc("month", utc)), BigInteger)
