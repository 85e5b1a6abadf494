"""The sums of a home page: charges by day, the month's prompts and what the cache saved on them, and the tenants that
spent most. Everything is read from rollups, and charges for kept KV from their own rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from sqlalchemy import BigInteger, ColumnElement, cast, func, literal, select, union_all
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.billing import residency_sums
from accounting.prices import prices
from accounting.prices.pricing import PER_MILLION
from accounting.tables.invoice_models import RollupMonth
from accounting.tables.models import RollupDay, Tenant
from accounting.tables.residency_models import ResidencyCharge
from accounting.values.periods import DAY_S, bounds, period_of
from accounting.values.types import OPERATOR_TENANT

INPUT = ("cache_read", "cache_write", "uncached")


class Prompts(msgspec.Struct, frozen=True):
    """The prompts of a month in one currency. `saved` is what they would have cost with all tokens uncached, less what
    they did cost. It is below 0 where writing into the cache cost more than reading from it gave back."""

    num_requests: int
    num_tokens: int
    num_cached: int
    saved: int


class Spender(msgspec.Struct, frozen=True):
    tenant_id: str
    name: str
    currency: str
    num_requests: int
    charge: int


async def charges_by_day(
    conn: AsyncConnection, start: int, end: int, tenant_id: str | None
) -> dict[str, dict[int, int]]:
    """Returns the micro-units of each UTC day in [start, end), by currency and by the day's first second. Days without
    a charge are left out. Without `tenant_id` they are those of all tenants; the operator is none of them."""
    query = select(RollupDay.currency, RollupDay.bucket, cast(func.sum(RollupDay.charge), BigInteger)).where(
        RollupDay.bucket >= start, RollupDay.bucket < end, _is_of(RollupDay, tenant_id)
    )
    found: dict[str, dict[int, int]] = {}
    for currency, day, charge in await conn.execute(query.group_by(RollupDay.currency, RollupDay.bucket)):
        found.setdefault(currency, {})[day] = charge
    mine = None if tenant_id is None else [tenant_id]
    async for one in residency_sums.by_bucket(conn, start, end, DAY_S, mine, columns=()):
        days = found.setdefault(one.currency, {})
        days[one.start] = days.get(one.start, 0) + sum(kept.amount for _, kept in one.kept)
    return found


async def prompts(conn: AsyncConnection, month: int, tenant_id: str | None) -> dict[str, Prompts]:
    """Returns the prompts of the month that begins at `month`, by currency. Without `tenant_id` they are those of all
    tenants; the operator, who fills public prefixes, is none of them."""
    keys = (RollupMonth.price_version, RollupMonth.model, RollupMonth.tier, RollupMonth.currency)
    sums = ("num_requests", *INPUT, *(f"charge_{name}" for name in INPUT))
    totals = [cast(func.sum(getattr(RollupMonth, name)), BigInteger).label(name) for name in sums]
    query = select(*keys, *totals).where(RollupMonth.bucket == month, _is_of(RollupMonth, tenant_id))
    found: dict[str, Prompts] = {}
    for row in (await conn.execute(query.group_by(*keys))).mappings().all():
        rates = await prices.rates_of(conn, row["price_version"], row["model"], row["tier"])
        num_tokens = sum(row[name] for name in INPUT)
        cost = sum(row[f"charge_{name}"] for name in INPUT)
        saved = 0 if rates is None else num_tokens * rates.uncached // PER_MILLION - cost
        before = found.get(row["currency"], Prompts(0, 0, 0, 0))
        found[row["currency"]] = Prompts(
            before.num_requests + row["num_requests"],
            before.num_tokens + num_tokens,
            before.num_cached + row["cache_read"],
            before.saved + saved,
        )
    return found


async def top_tenants(conn: AsyncConnection, month: int, limit: int) -> Sequence[Spender]:
    """Returns the tenants with the highest charges of the month that begins at `month`, those for kept KV included. The
    operator is none of them."""
    used, kept = RollupMonth, ResidencyCharge
    requests = select(used.tenant_id, used.currency, used.num_requests, used.charge)
    requests = requests.where(used.bucket == month, _is_of(used, None))
    _, end = bounds(period_of(month))
    residency = select(kept.tenant_id, kept.currency, literal(0), kept.charge_cache + kept.charge_pinned)
    residency = residency.where(kept.hour >= month, kept.hour < end)
    each = union_all(requests, residency).subquery().c
    charge, num_requests = (cast(func.sum(one), BigInteger) for one in (each.charge, each.num_requests))
    sums = (
        select(each.tenant_id, each.currency, num_requests.label("num_requests"), charge.label("charge"))
        .group_by(each.tenant_id, each.currency)
        .order_by(charge.desc(), each.tenant_id)
        .limit(limit)
        .subquery()
    )
    query = select(sums.c.tenant_id, Tenant.name, sums.c.currency, sums.c.num_requests, sums.c.charge)
    query = query.outerjoin(Tenant, Tenant.id == sums.c.tenant_id).order_by(sums.c.charge.desc(), sums.c.tenant_id)
    return [Spender(row[0], row[1] or "", *row[2:]) for row in await conn.execute(query)]


def _is_of(table: type[RollupDay | RollupMonth], tenant_id: str | None) -> ColumnElement[bool]:
    return table.tenant_id != OPERATOR_TENANT if tenant_id is None else table.tenant_id == tenant_id
