"""Sums of charges for kept KV, from the invoices and from the charges, and a check that prices the charges once
more."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from sqlalchemy import ColumnElement, Select, func, select
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import InstrumentedAttribute

from accounting.prices import prices, pricing
from accounting.prices.repricing import ROWS_AT_ONCE
from accounting.tables.invoice_models import Invoice, InvoiceLine
from accounting.tables.residency_models import ResidencyCharge, ResidencyReading
from accounting.values.periods import period_of

ResidencyClass = Literal["residency_cache", "residency_pinned"]
CLASSES: tuple[ResidencyClass, ...] = ("residency_cache", "residency_pinned")
HOUR_MS = 3_600_000


class Key(NamedTuple):
    period: str
    model: str
    price_version: str
    currency: str
    token_class: str


class Kept(NamedTuple):
    """KV that was kept, and its price in micro-units. `byte_hours` counts whole byte-hours of each charge."""

    byte_hours: int = 0
    amount: int = 0

    def __sub__(self, other: Kept) -> Kept:
        return Kept(self.byte_hours - other.byte_hours, self.amount - other.amount)


class Bucket(NamedTuple):
    """KV that one group kept in one bucket. What the sums are not grouped by is an empty text."""

    start: int
    tenant_id: str
    model: str
    price_version: str
    currency: str
    kept: Sequence[tuple[ResidencyClass, Kept]]
    """The classes that are not empty."""


GROUPS = ("tenant_id", "model", "price_version")
"""Names that the sums of a bucket may be grouped by; they always are by currency."""


async def charged(conn: AsyncConnection, tenant_id: str, *where: ColumnElement[bool]) -> dict[Key, Kept]:
    table = ResidencyCharge
    groups = (table.hour, table.model, table.price_version, table.currency)
    query = select(*groups, *_sums()).where(table.tenant_id == tenant_id, *where)
    found: dict[Key, Kept] = {}
    for row in await conn.execute(query.group_by(*groups)):
        for token_class, kept in _by_class(row[len(groups) :]):
            key = Key(period_of(row.hour), row.model, row.price_version, row.currency, token_class)
            before = found.get(key, Kept())
            found[key] = Kept(before.byte_hours + kept.byte_hours, before.amount + kept.amount)
    return found


async def invoiced(conn: AsyncConnection, tenant_id: str) -> dict[Key, Kept]:
    line = InvoiceLine
    groups = (line.period, line.model, line.price_version, Invoice.currency, line.token_class)
    query = (
        select(*groups, func.sum(line.quantity), func.sum(line.amount))
        .join(Invoice, Invoice.number == line.number)
        .where(Invoice.tenant_id == tenant_id)
        .where(line.kind == "usage", line.token_class.in_(CLASSES))
        .group_by(*groups)
    )
    return {Key(*row[:5]): Kept(int(row[5]), int(row[6])) for row in await conn.execute(query)}


async def by_bucket(
    conn: AsyncConnection,
    start: int,
    end: int,
    seconds: int,
    tenant_ids: Sequence[str] | None = None,
    *,
    columns: Collection[str] = GROUPS,
    limit: int | None = None,
) -> AsyncIterator[Bucket]:
    """Yields the sums over hours in [start, end), by buckets of `seconds` (whole hours) and by these columns; the first
    `limit` at most."""
    table = ResidencyCharge
    bucket = (table.hour - table.hour % seconds).label("bucket")
    groups = [bucket, *(getattr(table, name) for name in GROUPS if name in columns), table.currency]
    query = select(*groups, *_sums()).where(table.hour >= start, table.hour < end)
    if tenant_ids is not None:
        query = query.where(table.tenant_id.in_(tenant_ids))
    for row in await conn.execute(query.group_by(*groups).order_by(*groups).limit(limit)):
        tenant_id, model, price_version = (row._mapping.get(name, "") for name in GROUPS)
        kept = list(_by_class(row[len(groups) :]))
        yield Bucket(row.bucket, tenant_id, model, price_version, row.currency, kept)


async def by_hour(conn: AsyncConnection, tenant_id: str, start: int, end: int) -> dict[int, int]:
    """Returns the micro-units of each hour that has any."""
    query = _charges(tenant_id, start, end, ResidencyCharge.hour)
    return {hour: int(amount) for hour, amount in await conn.execute(query)}


async def by_model(conn: AsyncConnection, tenant_id: str, start: int, end: int) -> dict[tuple[str, str], int]:
    """Returns the micro-units of hours that begin in [start, end), by model and currency."""
    query = _charges(tenant_id, start, end, ResidencyCharge.model, ResidencyCharge.currency)
    return {(model, currency): int(amount) for model, currency, amount in await conn.execute(query)}


def _charges(tenant_id: str, start: int, end: int, *groups: InstrumentedAttribute[Any]) -> Select[Any]:
    table = ResidencyCharge
    query = select(*groups, func.sum(table.charge_cache + table.charge_pinned)).group_by(*groups)
    return query.where(table.tenant_id == tenant_id, table.hour >= start, table.hour < end)


class TenantKept(NamedTuple):
    """KV that caches kept for one tenant, in byte-hours, and micro-units that were charged for it, by currency."""

    cache: int
    pinned: int
    charges: Mapping[str, int]


async def by_tenant(conn: AsyncConnection, start: int, tenant_ids: Collection[str]) -> dict[str, TenantKept]:
    """Returns what was kept for these tenants in the hours from `start` on, charged or not yet. Readings are stored for
    two days."""
    reading, charge = ResidencyReading, ResidencyCharge
    kept = (
        select(reading.tenant_id, func.sum(reading.cache), func.sum(reading.pinned))
        .where(reading.hour >= start, reading.tenant_id.in_(tenant_ids))
        .group_by(reading.tenant_id)
    )
    charged = (
        select(charge.tenant_id, charge.currency, func.sum(charge.charge_cache + charge.charge_pinned))
        .where(charge.hour >= start, charge.tenant_id.in_(tenant_ids))
        .group_by(charge.tenant_id, charge.currency)
    )
    charges: dict[str, dict[str, int]] = {}
    for tenant_id, currency, amount in await conn.execute(charged):
        charges.setdefault(tenant_id, {})[currency] = int(amount)
    return {
        row[0]: TenantKept(int(row[1]) // HOUR_MS, int(row[2]) // HOUR_MS, charges.get(row[0], {}))
        for row in await conn.execute(kept)
    }


async def wrong(conn: AsyncConnection) -> tuple[int, list[str]]:
    """Returns the number of charges, and the ids of those that differ from the kept bytes times their rate."""
    rates: dict[tuple[str, str], tuple[int, int] | None] = {}
    num_rows, failures = 0, []
    query = select(ResidencyCharge.__table__).execution_options(yield_per=ROWS_AT_ONCE)
    async with conn.stream(query) as rows:
        async for row in rows:
            key = row.price_version, row.model
            if key not in rates:
                rates[key] = await prices.residency_rates(conn, *key)
            priced, num_rows = rates[key], num_rows + 1
            charge = None if priced is None else pricing.residency_charge((row.cache, row.pinned), priced)
            if charge != [row.charge_cache, row.charge_pinned]:
                failures.append(row.request_id)
    return num_rows, failures


def _sums() -> list[ColumnElement[int]]:
    """Returns byte-hours and micro-units of each class, in adjacent columns."""
    table = ResidencyCharge
    parts = ((table.cache, table.charge_cache), (table.pinned, table.charge_pinned))
    return [func.sum(x) for kept, charge in parts for x in (kept // HOUR_MS, charge)]


def _by_class(sums: Sequence[Any]) -> Iterator[tuple[ResidencyClass, Kept]]:
    """Yields the classes that are not empty."""
    for i, token_class in enumerate(CLASSES):
        kept = Kept(int(sums[2 * i]), int(sums[2 * i + 1]))
        if kept != Kept():
            yield token_class, kept
