"""The SQL snapshot of tenants' limits at one moment. The limiter is rebuilt from it.

The module knows ids and integers; the gateway knows the meaning of a running request's detail. If a time, a price or a
key is not known, it is assumed to the disadvantage of the tenant.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import Select, exists, func, literal, select, true
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database.db import among
from accounting.limits import budgets, quotas, spend
from accounting.limits.end_users import DAY_BUCKET_MS, DAY_MS
from accounting.limits.limiter_state import Running
from accounting.prices import prices, pricing
from accounting.tables.limiter_models import EndUserUse, LimiterGateway, LimiterRunning
from accounting.tables.models import EngineRecordRow, LedgerEntry, Tenant
from accounting.values.budget_types import Budget, Dimension, Period
from accounting.values.types import Usage

ENDINGS = ("settle", "void")
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
    """Return the snapshot of each tenant under its epoch, all read in the caller's one transaction. The number of
    statements does not grow with the number of tenants."""
    running = await _running(conn, epochs)
    unposted = await _unposted(conn, epochs, running, now_ms)
    newest = await _newest(conn, epochs)
    moments = {
        tenant_id: {
            now_ms - CLOCKS_APART_MS,
            now_ms,
            max(now_ms, newest.get(tenant_id, 0)),
            *(one.opened_ms for one in running[tenant_id]),
            *(one.at_ms for one in unposted[tenant_id]),
        }
        for tenant_id in epochs
    }
    spent = await _spent(conn, moments)
    recent = await _recent(conn, epochs, now_ms)
    limits = await quotas.of_tenants(conn, epochs)
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
    """Return the endings of those requests that have one in the ledger."""
    if not request_ids:
        return {}
    entry = LedgerEntry
    query = select(entry.request_id, entry.charge, LEDGER.input, entry.output).where(
        among(conn, entry.request_id, request_ids), entry.kind.in_(ENDINGS)
    )
    return {row[0]: Ended(*row[1:]) for row in await conn.execute(query)}


async def _running(conn: AsyncConnection, epochs: Mapping[str, int]) -> dict[str, list[Running]]:
    """Return the requests that are listed and not in the ledger, by tenant."""
    table = LimiterRunning
    query = select(table.__table__).where(among(conn, table.tenant_id, epochs), table.epoch >= min(epochs.values()))
    newest = {
        row.request_id: Running(row.request_id, row.slot, row.tenant_id, row.opened_ms, row.detail)
        for row in await conn.execute(query.order_by(table.epoch))
        if row.epoch >= epochs[row.tenant_id]
    }
    ended = await endings(conn, newest)
    found: dict[str, list[Running]] = defaultdict(list)
    for request_id, one in newest.items():
        if request_id not in ended:
            found[one.tenant_id].append(one)
    return found


async def _unposted(
    conn: AsyncConnection, epochs: Mapping[str, int], running: Mapping[str, Sequence[Running]], now_ms: int
) -> dict[str, list[Unposted]]:
    """Return unposted attempts of dead gateways, which are those that did not list. If there is none, the request of
    every record is listed or has ended."""
    silent = select(func.min(LimiterGateway.listed_at_ms)).where(LimiterGateway.epoch < max(epochs.values()))
    found: dict[str, list[Unposted]] = defaultdict(list)
    since_ms = await conn.scalar(silent)
    if since_ms is None:
        return found
    record = EngineRecordRow
    ended = exists().where(LedgerEntry.request_id == record.request_id, LedgerEntry.kind.in_(ENDINGS))
    query = select(record.__table__).where(
        among(conn, record.tenant_id, epochs), record.posted_at_ms >= since_ms - LONG_MS, ~ended
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


async def _newest(conn: AsyncConnection, tenant_ids: Collection[str]) -> dict[str, int]:
    """Return by tenant the moment of the newest request in the ledger. The reader's clock may have stepped back behind
    it: what the others then charge to is that request's period."""
    newest = select(func.max(LedgerEntry.opened_at_ms)).where(LedgerEntry.tenant_id == Tenant.id).scalar_subquery()
    query = select(Tenant.id, newest).where(among(conn, Tenant.id, tenant_ids))
    return {tenant_id: at_ms for tenant_id, at_ms in await conn.execute(query) if at_ms is not None}


async def _spent(conn: AsyncConnection, moments: Mapping[str, Collection[int]]) -> dict[str, list[Spent]]:
    """Return the sums of every budget, for the periods that contain one of its tenant's moments."""
    uses = [
        (budget, period)
        for tenant_id, of_tenant in (await budgets.of_tenants(conn, moments)).items()
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
    LedgerEntry.kind.in_(ENDINGS),
)
END_USERS = Source(EndUserUse, (EndUserUse.place,), EndUserUse.input, true())


async def _day(
    conn: AsyncConnection, dimensions: Mapping[str, Collection[str]], now_ms: int
) -> dict[str, list[Recent]]:
    by_day = [t for t, of_tenant in dimensions.items() if any("per_day" in d for d in of_tenant)]
    found: dict[str, list[Recent]] = defaultdict(list)
    for source in (LEDGER, END_USERS) if by_day else ():
        table = source.table
        begun = _floor(table.opened_at_ms, DAY_BUCKET_MS)
        sums = func.count(), func.sum(source.input), func.sum(table.output)
        query = _of(conn, source, by_day, begun, *sums).where(table.opened_at_ms >= now_ms - DAY_MS)
        await _read_into(found, conn, query)
    return found


async def _recent(conn: AsyncConnection, tenant_ids: Collection[str], now_ms: int) -> dict[str, list[Recent]]:
    """Return the last minute: requests and input by the second they began in, output by the second they ended in."""
    since_ms = now_ms - 61_000
    found: dict[str, list[Recent]] = defaultdict(list)
    for source in (LEDGER, END_USERS):
        table = source.table
        begun, ended = _floor(table.opened_at_ms, 1000), _floor(table.ended_at_ms, 1000)
        inputs = func.count(), func.sum(source.input), literal(0)
        outputs = literal(0), literal(0), func.sum(table.output)
        began_now = _of(conn, source, tenant_ids, begun, *inputs).where(table.opened_at_ms >= since_ms)
        ended_now = _of(conn, source, tenant_ids, ended, *outputs).where(
            table.opened_at_ms >= since_ms - LONG_MS, table.ended_at_ms >= since_ms
        )
        await _read_into(found, conn, began_now)
        await _read_into(found, conn, ended_now)
    return found


def _of(conn: AsyncConnection, source: Source, tenant_ids: Collection[str], moment: Any, *sums: Any) -> Select[Any]:
    """Select ended requests of the tenants, grouped by time and sender."""
    groups = (source.table.tenant_id, moment, *source.who)
    return (
        select(*groups[:2], *sums, *source.who)
        .where(among(conn, source.table.tenant_id, tenant_ids), source.ended)
        .group_by(*groups)
    )


async def _read_into(found: dict[str, list[Recent]], conn: AsyncConnection, query: Select[Any]) -> None:
    for tenant_id, moment, requests, input_, output, *who in await conn.execute(query):
        named = (*who, "") if len(who) > 1 else ("", "", "", *who)
        key_id, model, tier, end_user = named
        found[tenant_id].append(
            Recent(int(moment) // 1000, key_id, model, tier, int(requests), int(input_), int(output), end_user)
        )


def _floor(column: Any, width_ms: int) -> Any:
    return column - column % width_ms
