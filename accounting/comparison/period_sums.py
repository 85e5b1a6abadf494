"""Two periods of a tenant, read from sums alone: never from ledger rows, so that it takes as long with ten million
requests as with ten.

A period is whole minutes of UTC, as minutes are the finest sums. It has what began in it: requests by their start, kept
KV by its hour, corrections by the time at which they were given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import BigInteger, FromClause, Select, cast, func, literal, select, union_all
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.billing import credits, residency_sums
from accounting.comparison.causes import Line, Period
from accounting.ledger import rollups
from accounting.prices import prices
from accounting.prices.repricing import RatesByVersion
from accounting.tenants import tenants
from accounting.values.errors import ConflictError, InvalidError
from accounting.values.periods import DAY_S, LAST_SECOND
from accounting.values.types import TOKEN_CLASSES, Rates, Usage

MINUTE_S = 60
MAX_DAYS = 366
MAX_KEYS = 10
FREE = Rates(0, 0, 0, 0)

GROUPS = ("model", "tier", "price_version", "currency")
SUMS = ("num_requests", *TOKEN_CLASSES, "charge")


class Interval(NamedTuple):
    """A span of time in Unix seconds. It does not include its end."""

    start: int
    end: int


class Intervals(NamedTuple):
    before: Interval
    after: Interval


class KeyCharges(msgspec.Struct, frozen=True):
    """The charges of requests of one key in the two periods."""

    key_id: str
    before: int
    after: int


class Periods(msgspec.Struct, frozen=True):
    intervals: Intervals
    currency: str
    before: Period
    after: Period
    keys: list[KeyCharges]
    """The keys whose charges changed most, at most `MAX_KEYS`."""


def intervals(start: int, end: int | None, before_start: int | None, before_end: int | None, now: int) -> Intervals:
    """Returns the periods that are meant: the later one, and the one that it is compared with. Without an end the later
    one ends now, as does one that still runs. Without a start the other one is the same length of time directly before.
    Raises InvalidError."""
    now = _minute(now)
    after = _interval("", start, now if end is None else end, now)
    if before_start is None:
        if before_end is not None:
            raise InvalidError("before_end_time needs before_start_time.", "before_end_time")
        before_start, before_end = 2 * after.start - after.end, after.start
    if before_end is None:
        before_end = before_start + after.end - after.start
    return Intervals(_interval("before_", before_start, before_end, now), after)


def _interval(name: str, start: int, end: int, now: int) -> Interval:
    start, end = _minute(start), _minute(end)
    if not 0 <= start < end <= LAST_SECOND:
        raise InvalidError(
            f"{name}start_time must lie at least a minute before {name}end_time, both Unix seconds.",
            f"{name}start_time",
        )
    if end - start > MAX_DAYS * DAY_S:
        raise InvalidError(f"A period has at most {MAX_DAYS} days.", f"{name}end_time")
    return Interval(start, min(end, now) if start < now else end)


def _minute(second: int) -> int:
    return second - second % MINUTE_S


async def read(
    conn: AsyncConnection, tenant_id: str, intervals: Intervals, *, key_id: str | None = None, model: str | None = None
) -> Periods:
    """Reads both periods of a tenant, or what one key or model was charged. Corrections belong to a request and not to
    a sum, so they are in a whole tenant's periods alone; and no key keeps KV. Raises NotFoundError for an unknown
    tenant, ConflictError for more than one currency."""
    await tenants.get(conn, tenant_id)
    where = {"tenant_id": tenant_id, "key_id": key_id, "model": model}
    source = _buckets(intervals, {name: value for name, value in where.items() if value is not None})
    lines, currencies = await _lines(conn, source)
    periods: list[Period] = []
    for interval, mine in zip(intervals, lines, strict=True):
        kept, corrected = {}, {}
        if key_id is None:
            kept = await residency_sums.by_model(conn, tenant_id, *interval)
        if key_id is None and model is None:
            corrected = await credits.corrected(conn, tenant_id, *interval)
        currencies |= {*corrected, *(currency for _, currency in kept)}
        residency = {name: amount for (name, _), amount in kept.items() if model in (None, name)}
        corrections = -sum(corrected.values())
        seconds = interval.end - interval.start
        periods.append(Period(seconds=seconds, lines=tuple(mine), residency=residency, corrections=corrections))
    if not currencies:
        currencies = {*(await prices.currencies(conn, [tenant_id], intervals.after.start * 1000)).values()}
    if len(currencies) > 1:
        raise ConflictError("The tenant was charged in more than one currency.")
    (currency,), (before, after) = currencies, periods
    return Periods(intervals, currency, before, after, await _keys(conn, source))


def _buckets(intervals: Intervals, where: Mapping[str, str]) -> FromClause:
    """Returns the sums of both periods. `is_after` says which of the two a row belongs to."""
    parts: list[Select[Any]] = []
    for is_after, interval in enumerate(intervals):
        for width, buckets in rollups.covering(*interval).items():
            table = rollups.table_of(width).__table__.c
            columns = (table[name] for name in ("key_id", *GROUPS, *SUMS))
            equal = (table[name] == value for name, value in where.items())
            parts.append(select(literal(is_after).label("is_after"), *columns).where(table.bucket.in_(buckets), *equal))
    return union_all(*parts).subquery("buckets")


async def _lines(conn: AsyncConnection, source: FromClause) -> tuple[tuple[list[Line], list[Line]], set[str]]:
    """Returns the lines of each period, and all currencies."""
    groups = [source.c[name] for name in ("is_after", *GROUPS)]
    # PostgreSQL sums BIGINT as NUMERIC.
    totals = [cast(func.sum(source.c[name]), BigInteger).label(name) for name in SUMS]
    rows = (await conn.execute(select(*groups, *totals).group_by(*groups).order_by(*groups))).all()
    rates = RatesByVersion()
    lines: tuple[list[Line], list[Line]] = [], []
    for row in rows:
        lines[row.is_after].append(
            Line(
                model=row.model,
                tier=row.tier,
                num_requests=row.num_requests,
                usage=Usage(*(getattr(row, name) for name in TOKEN_CLASSES)),
                charge=row.charge,
                rates=await rates.of(conn, row.price_version, row.model, row.tier) or FREE,
            )
        )
    return lines, {row.currency for row in rows}


async def _keys(conn: AsyncConnection, source: FromClause) -> list[KeyCharges]:
    after = cast(func.sum(source.c.charge * source.c.is_after), BigInteger)
    before = cast(func.sum(source.c.charge), BigInteger) - after
    query = (
        select(source.c.key_id, before, after)
        .group_by(source.c.key_id)
        .having(func.abs(after - before) > 0)
        .order_by(func.abs(after - before).desc(), source.c.key_id)
        .limit(MAX_KEYS)
    )
    return [KeyCharges(*row) for row in await conn.execute(query)]
