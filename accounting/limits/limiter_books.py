"""The SQL snapshot of tenants' limits at one moment. The limiter is rebuilt from it.

The module knows ids and integers; the gateway knows the meaning of a running request's detail. If a time, a price or a
key is not known, it is assumed to the disadvantage of the tenant.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
from sqlalchemy import Row, bindparam, exists, func, literal, or_, select, true
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database.db import among, among_given, given
from accounting.database.driver_selects import select_together
from accounting.limits import budgets, quotas, spend
from accounting.limits.end_users import DAY_BUCKET_MS, DAY_MS
from accounting.limits.limiter_state import Running
from accounting.prices import prices, pricing
from accounting.tables.limiter_models import EndUserUse, LimiterGateway, LimiterRunning
from accounting.tables.models import EngineRecordRow, LedgerEntry, Tenant
from accounting.values.budget_types import Budget, Dimension, Period
from accounting.values.types import Usage

ENDINGS = ("settle", "void")
_NEWEST = select(func.max(LedgerEntry.opened_at_ms)).where(LedgerEntry.tenant_id == Tenant.id).scalar_subquery()
"""The moment of a tenant's newest request in the ledger. The reader's clock may have stepped back behind it: what the
others then charge to is that request's period."""
CLOCKS_APART_MS = 5_000
"""The most that two gateways' clocks may differ: at the beginning of a period another gateway may still be in the one
before."""
LONG_MS = 15 * 60_000
"""The snapshot does not look for requests that began longer ago than this."""


class Ended(msgspec.Struct, frozen=True):
    """The charge and tokens of an ended request. `input` counts prompt tokens that were not cached."""

    charge: int
    input: int
    output: int


class Recent(msgspec.Struct, frozen=True):
    """Requests of one key, model and tier that began in one second; for `output`, requests that ended in it."""

    second: int
    key_id: str
    model: str
    tier: str
    num_requests: int = 0
    input: int = 0
    output: int = 0
    end_user: str = ""
    """The digest that names an end user, used instead of key, model and tier."""


class Spent(msgspec.Struct, frozen=True):
    budget: Budget
    period: Period
    used: int


class Unposted(msgspec.Struct, frozen=True):
    """An attempt that an engine recorded and whose request nobody ended, as its gateway died."""

    at_ms: int
    """Milliseconds at which the record was posted."""
    charge: int
    """Its charge at the highest rates in force for the tenant, as the record names no key and no model."""
    input: int
    output: int


class Snapshot(msgspec.Struct, frozen=True):
    """The limits of one tenant at one moment."""

    running: tuple[Running, ...]
    """Requests that are listed and not in the ledger: if both know a request, the ledger counts."""
    spent: tuple[Spent, ...]
    recent: tuple[Recent, ...]
    day: tuple[Recent, ...] = ()
    """The last 24 hours by the beginning of each request; filled only if some limit is per day."""
    unposted: tuple[Unposted, ...] = ()
    dimensions: frozenset[Dimension] = frozenset()
    """The dimensions of the tenant's quotas."""
    until_ms: int = 0
    """No request that began after this moment is in the books or in a list. It is the moment of reading, or a later one
    where the reader's clock is behind that of a gateway."""


async def snapshots(conn: AsyncConnection, epochs: Mapping[str, int], now_ms: int) -> dict[str, Snapshot]:
    """Returns the snapshot of each tenant under its epoch, all read in the caller's one transaction. The number of
    statements does not grow with the number of tenants."""
    named = given(conn, epochs) | {
        "oldest_epoch": min(epochs.values()),
        "newest_epoch": max(epochs.values()),
        "minute_ms": now_ms - 61_000,
        "long_ms": now_ms - 61_000 - LONG_MS,
    }
    listed, newest, ((silent_ms,),), of_budgets, adjustments, of_quotas, *lately = await select_together(
        conn, named, *_statements(conn.dialect.name)
    )
    running = await _running(conn, epochs, listed)
    unposted = await _unposted(conn, epochs, running, silent_ms, now_ms)
    newest_ms = dict(newest)
    moments = {
        tenant_id: {
            now_ms - CLOCKS_APART_MS,
            now_ms,
            max(now_ms, newest_ms.get(tenant_id) or 0),
            *(one.opened_ms for one in running[tenant_id]),
            *(one.at_ms for one in unposted[tenant_id]),
        }
        for tenant_id in epochs
    }
    spent = await _spent(conn, moments, budgets.by_tenant(budgets.whole(of_budgets, adjustments)))
    recent: dict[str, list[Recent]] = defaultdict(list)
    for rows in lately:
        _read_into(recent, rows)
    limits = quotas.by_tenant(of_quotas)
    dimensions = {t: frozenset(quota.dimension for quota in limits.get(t, ())) for t in epochs}
    day = await _day(conn, dimensions, now_ms)
    return {
        tenant_id: Snapshot(
            tuple(running[tenant_id]),
            tuple(spent[tenant_id]),
            tuple(recent[tenant_id]),
            tuple(day[tenant_id]),
            tuple(unposted[tenant_id]),
            dimensions[tenant_id],
            max(moments[tenant_id]),
        )
        for tenant_id in epochs
    }


async def endings(conn: AsyncConnection, request_ids: Collection[str]) -> Mapping[str, Ended]:
    """Returns the endings of those requests that have one in the ledger."""
    if not request_ids:
        return {}
    entry = LedgerEntry
    query = select(entry.request_id, entry.charge, LEDGER.input, entry.output).where(
        among(conn, entry.request_id, request_ids), entry.kind.in_(ENDINGS)
    )
    return {row[0]: Ended(*row[1:]) for row in await conn.execute(query)}


@cache
def _statements(dialect: str) -> tuple[Any, ...]:
    """Returns what is read of all tenants (`given`) in any case: their lists, their newest requests, the oldest list of
    a gateway that is behind, budgets, their adjustments, quotas, and the last minute."""
    return (
        select(LimiterRunning.__table__)
        .where(among_given(dialect, LimiterRunning.tenant_id), LimiterRunning.epoch >= bindparam("oldest_epoch"))
        .order_by(LimiterRunning.epoch),
        select(Tenant.id, _NEWEST).where(among_given(dialect, Tenant.id)),
        select(func.min(LimiterGateway.listed_at_ms)).where(LimiterGateway.epoch < bindparam("newest_epoch")),
        *budgets.of_given_tenants(dialect),
        quotas.of_given_tenants(dialect),
        *(query for source in (LEDGER, END_USERS) for query in _recent(dialect, source)),
    )


async def _running(
    conn: AsyncConnection, epochs: Mapping[str, int], listed: Sequence[Row[Any]]
) -> dict[str, list[Running]]:
    """Returns the requests that are listed and not in the ledger, by tenant."""
    newest = {
        row.request_id: Running(row.request_id, row.slot, row.tenant_id, row.opened_ms, row.detail)
        for row in listed
        if row.epoch >= epochs[row.tenant_id]
    }
    ended = await endings(conn, newest)
    found: dict[str, list[Running]] = defaultdict(list)
    for request_id, one in newest.items():
        if request_id not in ended:
            found[one.tenant_id].append(one)
    return found


async def _unposted(
    conn: AsyncConnection,
    epochs: Mapping[str, int],
    running: Mapping[str, Sequence[Running]],
    silent_ms: int | None,
    now_ms: int,
) -> dict[str, list[Unposted]]:
    """Returns unposted attempts of dead gateways, which are those that did not list; the first of them has been silent
    since `silent_ms`. If there is none, the request of every record is listed or has ended."""
    found: dict[str, list[Unposted]] = defaultdict(list)
    if silent_ms is None:
        return found
    record = EngineRecordRow
    ended = exists().where(LedgerEntry.request_id == record.request_id, LedgerEntry.kind.in_(ENDINGS))
    query = select(record.__table__).where(
        among(conn, record.tenant_id, epochs), record.posted_at_ms >= silent_ms - LONG_MS, ~ended
    )
    listed = {one.request_id for of_tenant in running.values() for one in of_tenant}
    rows = [row for row in await conn.execute(query) if row.request_id not in listed]
    rates = await prices.highest_rates(conn, {row.tenant_id for row in rows}, now_ms)
    for row in rows:
        usage = Usage(row.cache_read, row.cache_write, row.uncached, row.output)
        priced = rates.get(row.tenant_id)
        charge = 0 if priced is None else pricing.charge(usage, priced).total
        found[row.tenant_id].append(
            Unposted(row.posted_at_ms, charge, usage.cache_write + usage.uncached, usage.output)
        )
    return found


async def _spent(
    conn: AsyncConnection, moments: Mapping[str, Collection[int]], by_tenant: Mapping[str, Sequence[Budget]]
) -> dict[str, list[Spent]]:
    """Returns the sums of every budget, for the periods that contain one of its tenant's moments."""
    uses = [
        (budget, period)
        for tenant_id, of_tenant in by_tenant.items()
        for budget in of_tenant
        for period in _periods(budget, moments[tenant_id])
    ]
    used = await spend.spent_of(conn, uses)
    found: dict[str, list[Spent]] = defaultdict(list)
    for (budget, period), amount in zip(uses, used, strict=True):
        found[budget.tenant_id].append(Spent(budget, period, amount))
    return found


def _periods(budget: Budget, moments: Collection[int]) -> list[Period]:
    found = {p for moment in moments if (p := budget.period_at(moment)) is not None}
    return sorted(found, key=lambda period: period.start_ms)


@dataclass(frozen=True)
class Source:
    """A table of the tokens that ended requests took, with the columns that name their sender."""

    table: Any
    who: tuple[Any, ...]
    input: Any
    ended: Any


LEDGER = Source(
    LedgerEntry,
    (LedgerEntry.key_id, LedgerEntry.model, LedgerEntry.tier),
    LedgerEntry.cache_write + LedgerEntry.uncached,
    or_(*(LedgerEntry.kind == kind for kind in ENDINGS)),
)
END_USERS = Source(EndUserUse, (EndUserUse.place,), EndUserUse.input, true())


async def _day(
    conn: AsyncConnection, dimensions: Mapping[str, Collection[str]], now_ms: int
) -> dict[str, list[Recent]]:
    by_day = [t for t, of_tenant in dimensions.items() if any("per_day" in d for d in of_tenant)]
    found: dict[str, list[Recent]] = defaultdict(list)
    if by_day:
        named = given(conn, by_day) | {"day_ms": now_ms - DAY_MS}
        for rows in await select_together(conn, named, *_of_day(conn.dialect.name)):
            _read_into(found, rows)
    return found


@cache
def _of_day(dialect: str) -> tuple[Any, ...]:
    return tuple(
        _of(
            dialect,
            source,
            _floor(source.table.opened_at_ms, DAY_BUCKET_MS),
            func.count(),
            func.sum(source.input),
            func.sum(source.table.output),
        ).where(source.table.opened_at_ms >= bindparam("day_ms"))
        for source in (LEDGER, END_USERS)
    )


def _recent(dialect: str, source: Source) -> tuple[Any, Any]:
    """Selects the last minute: requests and input by the second they began in, output by the second they ended in."""
    table = source.table
    begun, ended = _floor(table.opened_at_ms, 1000), _floor(table.ended_at_ms, 1000)
    inputs = func.count(), func.sum(source.input), literal(0)
    outputs = literal(0), literal(0), func.sum(table.output)
    return (
        _of(dialect, source, begun, *inputs).where(table.opened_at_ms >= bindparam("minute_ms")),
        _of(dialect, source, ended, *outputs).where(
            table.opened_at_ms >= bindparam("long_ms"), table.ended_at_ms >= bindparam("minute_ms")
        ),
    )


def _of(dialect: str, source: Source, moment: Any, *sums: Any) -> Any:
    """Selects ended requests of the tenants (`given`), grouped by time and sender."""
    groups = (source.table.tenant_id, moment, *source.who)
    return (
        select(*groups[:2], *sums, *source.who)
        .where(among_given(dialect, source.table.tenant_id), source.ended)
        .group_by(*groups)
    )


def _read_into(found: dict[str, list[Recent]], rows: Iterable[Any]) -> None:
    for tenant_id, moment, requests, input_, output, *who in rows:
        named = (*who, "") if len(who) > 1 else ("", "", "", *who)
        key_id, model, tier, end_user = named
        found[tenant_id].append(
            Recent(int(moment) // 1000, key_id, model, tier, int(requests), int(input_), int(output), end_user)
        )


def _floor(column: Any, width_ms: int) -> Any:
    return column - column % width_ms
