"""The effect of other prices: the last days under a sheet by the rates of a new version of it, and a month of tenants by
a version, perhaps changed by some percent.

The usage comes from the sums of days and months, so a preview is fast whatever the number of requests. It prices the sum of a model
and tier once, where a ledger row is rounded by itself: the two differ by less than one micro-unit for each request.
`rerating.py` prices row by row. What filled the operator's public prefixes is left out, because nobody pays for it. The
module writes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import BigInteger, cast, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database.db import among
from accounting.database.paging import Page
from accounting.prices import pricing
from accounting.prices.price_lists import SheetVersion
from accounting.prices.prices import RateTable, rates_in
from accounting.tables.invoice_models import RollupMonth
from accounting.tables.models import RollupDay
from accounting.values.periods import DAY_S, bounds
from accounting.values.types import OPERATOR_TENANT, TOKEN_CLASSES, Rates, Tier, Usage

NUM_DAYS = 7


class Effect(msgspec.Struct, frozen=True):
    """The effect on one model and tier. `priced` is None where the new version has no price, so that requests would be
    refused."""

    model: str
    tier: Tier
    num_requests: int
    usage: Usage
    charged: int
    priced: int | None


class TenantEffect(msgspec.Struct, frozen=True):
    """The effect on one tenant, in micro-units. `priced` counts what has a price: `num_unpriced` requests would have
    been refused."""

    tenant_id: str
    num_requests: int
    num_unpriced: int
    charged: int
    priced: int


async def effects(conn: AsyncConnection, sheet: str, rates: RateTable, now: int) -> Sequence[Effect]:
    """Returns the effects on the usage of the last `NUM_DAYS` UTC days, today among them, that any version of the sheet
    was charged for."""
    keys = (RollupDay.model, RollupDay.tier)
    sums = ("num_requests", *TOKEN_CLASSES, "charge")
    totals = [cast(func.sum(getattr(RollupDay, name)), BigInteger).label(name) for name in sums]
    first = now - now % DAY_S - (NUM_DAYS - 1) * DAY_S
    is_of_sheet = func.substr(RollupDay.price_version, 1, len(sheet) + 1) == f"{sheet}@"
    query = select(*keys, *totals)
    query = query.where(RollupDay.bucket >= first, is_of_sheet, RollupDay.tenant_id != OPERATOR_TENANT)
    query = query.group_by(*keys).order_by(*keys)
    return [_effect(rates, row._mapping) for row in await conn.execute(query)]


class MonthBy(msgspec.Struct, frozen=True):
    """A month of some tenants, priced by a version: which tenants, what each of them would pay, and the sums by model
    and tier over all of them."""

    currency: str
    tenants: Page[TenantEffect]
    models: Sequence[Effect]
    other_currencies: Sequence[str]
    """Usage in these currencies is left out, as no rate of exchange is known here."""


async def month_by(
    conn: AsyncConnection,
    period: str,
    version: SheetVersion,
    percent: int,
    *,
    tenant_id: str | None,
    after: str | None,
    limit: int,
) -> MonthBy:
    """Prices the month's usage under any sheet by the rates of `version`, raised by `percent` (lowered, below 0).
    Tenants come in pages, in the order of their ids. Raises InvalidError for what is no period."""
    month, _ = bounds(period)
    rates: RateTable = {(one.model, one.tier): _raised(one.rates, percent) for one in version.rates}
    where = [RollupMonth.bucket == month, RollupMonth.tenant_id != OPERATOR_TENANT]
    where += [] if tenant_id is None else [RollupMonth.tenant_id == tenant_id]
    currencies = await conn.execute(select(RollupMonth.currency).where(*where).distinct())
    others = sorted({row.currency for row in currencies} - {version.currency})
    where.append(RollupMonth.currency == version.currency)
    ids = select(RollupMonth.tenant_id).where(*where, RollupMonth.tenant_id > (after or "")).distinct()
    found = list((await conn.execute(ids.order_by(RollupMonth.tenant_id).limit(limit + 1))).scalars())
    of_tenants: dict[str, list[Effect]] = defaultdict(list)
    keys = (RollupMonth.tenant_id, RollupMonth.model, RollupMonth.tier)
    for row in await conn.execute(_summed(keys).where(*where, among(conn, RollupMonth.tenant_id, found[:limit]))):
        of_tenants[row.tenant_id].append(_effect(rates, row._mapping))
    models = [_effect(rates, row._mapping) for row in await conn.execute(_summed(keys[1:]).where(*where))]
    tenants = [_tenant(one, of_tenants[one]) for one in found[:limit]]
    return MonthBy(version.currency, Page(tenants, len(found) > limit), models, others)


def _summed(keys: Sequence[Any]) -> Any:
    sums = ("num_requests", *TOKEN_CLASSES, "charge")
    totals = [cast(func.sum(getattr(RollupMonth, name)), BigInteger).label(name) for name in sums]
    return select(*keys, *totals).group_by(*keys).order_by(*keys)


def _tenant(tenant_id: str, effects: Sequence[Effect]) -> TenantEffect:
    return TenantEffect(
        tenant_id,
        sum(one.num_requests for one in effects),
        sum(one.num_requests for one in effects if one.priced is None),
        sum(one.charged for one in effects),
        sum(one.priced or 0 for one in effects),
    )


def _raised(rates: Rates, percent: int) -> Rates:
    """Returns each rate changed by `percent`, rounded to whole micro-units, half up."""
    return Rates(*((rate * (100 + percent) + 50) // 100 for rate in msgspec.structs.astuple(rates)))


def _effect(rates: RateTable, row: Mapping[Any, Any]) -> Effect:
    usage, new = Usage(*(row[name] for name in TOKEN_CLASSES)), rates_in(rates, row["model"], row["tier"])
    priced = None if new is None else pricing.sum_charge(usage, new).total
    return Effect(row["model"], row["tier"], row["num_requests"], usage, row["charge"], priced)
