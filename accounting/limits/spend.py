"""Charges to a budget's period, summed from rollups, and the alerts that become due by them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec
from sqlalchemy import Select, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database.db import among_given, given, insert_new
from accounting.database.driver_selects import select_together
from accounting.database.paging import shaped
from accounting.events import events, outbox
from accounting.ledger import rollups
from accounting.ledger.rollups import Span, table_of
from accounting.limits import budgets
from accounting.prices import prices
from accounting.tables.budget_models import BudgetAlert
from accounting.values.budget_types import THRESHOLDS, Budget, Period
from accounting.values.periods import DAY_S
from accounting.values.types import LedgerRow

LONGEST_MS = 100 * 366 * DAY_S * 1000
"""A budget whose period is longer counts its first century."""


async def spent(conn: AsyncConnection, budget: Budget, period: Period) -> int:
    """Returns the settled charges of requests that began in the period, in micro-units."""
    return (await spent_of(conn, [(budget, period)]))[0]


async def spent_of(conn: AsyncConnection, uses: Sequence[tuple[Budget, Period]]) -> list[int]:
    """Returns the values of `spent` in the order of `uses`. There is one statement for each distinct period, for the
    budgets of all tenants."""
    tenants: dict[Period, set[str]] = defaultdict(set)
    for budget, period in uses:
        tenants[period].add(budget.tenant_id)
    charges = {period: await _charges(conn, tenants[period], period) for period in tenants}
    return [
        sum(row.charge for row in charges[period][budget.tenant_id] if budget.binds(row.key_id, row.model, row.tier))
        for budget, period in uses
    ]


class _Charged(msgspec.Struct, frozen=True):
    key_id: str
    model: str
    tier: str
    charge: int


async def _charges(conn: AsyncConnection, tenant_ids: Collection[str], period: Period) -> dict[str, list[_Charged]]:
    """Reads at most some two hundred buckets for each century, whatever the period's bounds are: rollups have no index
    that begins with a tenant, so a range of fine buckets would read those of all tenants."""
    start, end = period.start_ms // 1000, min(period.end_ms, period.start_ms + LONGEST_MS) // 1000
    found: dict[str, list[_Charged]] = defaultdict(list)
    for span, buckets in rollups.covering(start, end).items():
        named = given(conn, tenant_ids) | given(conn, buckets, "buckets")
        (rows,) = await select_together(conn, named, _charges_of(conn.dialect.name, span))
        for tenant_id, key_id, model, tier, charge in rows:
            found[tenant_id].append(_Charged(key_id, model, tier, int(charge)))
    return found


@cache
def _charges_of(dialect: str, span: Span) -> Select[*tuple[Any, ...]]:
    table = table_of(span)
    groups = (table.tenant_id, table.key_id, table.model, table.tier)
    query = select(*groups, func.sum(table.charge)).where(
        among_given(dialect, table.tenant_id), among_given(dialect, table.bucket, "buckets")
    )
    return query.group_by(*groups)


class Alert(msgspec.Struct, frozen=True):
    """A record that `threshold` percent of a budget were settled in the period."""

    budget_id: str
    period_start_ms: int
    threshold: int
    tenant_id: str
    used_micro_units: int
    limit_micro_units: int
    at_ms: int


async def alerts(conn: AsyncConnection, budget_ids: Collection[str]) -> dict[str, list[Alert]]:
    """Returns the alerts of all periods, by budget, oldest first."""
    table = BudgetAlert
    query = select(table.__table__).where(table.budget_id.in_(sorted(budget_ids)))
    found: dict[str, list[Alert]] = {}
    for row in await conn.execute(query.order_by(table.period_start_ms, table.threshold)):
        found.setdefault(row.budget_id, []).append(shaped(Alert, row))
    return found


async def note_alerts(conn: AsyncConnection, settled: Sequence[LedgerRow], now_ms: int) -> None:
    """Writes new alerts, in the transaction that posts `settled` and after its rollups."""
    if not settled:
        return
    by_tenant = await budgets.of_tenants(conn, {entry["tenant_id"] for entry in settled})
    uses = _touched(by_tenant, settled)
    rows = [
        row
        for (budget, period), used in zip(uses, await spent_of(conn, uses), strict=True)
        for row in _due(budget, period, used, now_ms)
    ]
    key = (BudgetAlert.budget_id, BudgetAlert.period_start_ms, BudgetAlert.threshold)
    new = {tuple(row) for row in await insert_new(conn, BudgetAlert.__table__, rows, key)}
    noted = [row for row in rows if tuple(row[column.key] for column in key) in new]
    currencies = await prices.currencies(conn, {row["tenant_id"] for row in noted}, now_ms) if noted else {}
    await outbox.write(conn, [events.budget_alert(row, currencies[row["tenant_id"]]) for row in noted])


def _touched(by_tenant: Mapping[str, Sequence[Budget]], settled: Sequence[LedgerRow]) -> list[tuple[Budget, Period]]:
    """Returns the budgets and periods that the entries count against, each once."""
    found: dict[tuple[str, int], tuple[Budget, Period]] = {}
    last: dict[str, Period] = {}
    for entry in settled:
        opened_ms = entry["opened_at_ms"]
        for budget in by_tenant.get(entry["tenant_id"], ()):
            known = last.get(budget.id)
            if known is not None and known.start_ms <= opened_ms < known.end_ms:
                continue
            if not budget.binds(entry["key_id"], entry["model"], entry["tier"]):
                continue
            if (period := budget.period_at(opened_ms)) is not None:
                last[budget.id] = period
                found[budget.id, period.start_ms] = (budget, period)
    return list(found.values())


def _due(budget: Budget, period: Period, used: int, now_ms: int) -> list[dict[str, Any]]:
    limit = budget.limit_at(now_ms)
    return [
        {
            "budget_id": budget.id,
            "period_start_ms": period.start_ms,
            "threshold": threshold,
            "tenant_id": budget.tenant_id,
            "used_micro_units": used,
            "limit_micro_units": limit,
            "at_ms": now_ms,
        }
        for threshold in THRESHOLDS
        if used * 100 >= limit * threshold
    ]
