"""Caps: the budgets that refuse requests, and the limit of all tenants together, with what is spent of each.

Amounts are the ledger's. The limiter also holds what open requests may still cost, so it refuses a little earlier.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.limits import budgets, spend, spend_limits
from accounting.prices import prices
from accounting.values.budget_types import Budget, Period, PeriodKind
from accounting.values.errors import NotFoundError
from accounting.values.types import OPERATOR_TENANT


class Cap(msgspec.Struct, frozen=True, kw_only=True):
    """One cap in its current period. Without a tenant it is that of all tenants together."""

    budget_id: str | None = None
    tenant_id: str | None = None
    key_id: str | None = None
    model: str | None = None
    tier: str | None = None
    kind: PeriodKind
    period: Period
    limit: int
    used: int
    currency: str

    def binds_all_of(self, tenant_id: str | None) -> bool:
        """Returns whether every request of the tenant counts, or without a tenant every request of all."""
        return self.tenant_id == tenant_id and not (self.key_id or self.model or self.tier)

    def reached_at_ms(self, now_ms: int) -> int | None:
        """Returns when the cap is reached at the mean pace of its period so far. None means that it lasts until its
        period ends."""
        if self.used >= self.limit:
            return now_ms
        if self.used <= 0:
            return None
        passed_ms = max(1, now_ms - self.period.start_ms)
        at_ms = now_ms + (self.limit - self.used) * passed_ms // self.used
        return at_ms if at_ms < self.period.end_ms else None


async def nearest(conn: AsyncConnection, now_ms: int, tenant_id: str | None, limit: int) -> Sequence[Cap]:
    """Returns the caps that are reached first, the nearest first; those that last until their period ends come last, the
    least share left first. Without `tenant_id` they are those of all tenants. A cap of everything that is asked for, the
    tenant or all of them, is returned beyond the limit too."""
    found = [*await _budgets(conn, now_ms, tenant_id)]
    if tenant_id is None:
        found += await _of_all(conn, now_ms)
    ordered = sorted(found, key=lambda cap: _nearness(cap, now_ms))
    return [cap for place, cap in enumerate(ordered) if place < limit or cap.binds_all_of(tenant_id)]


async def _budgets(conn: AsyncConnection, now_ms: int, tenant_id: str | None) -> Sequence[Cap]:
    if tenant_id is None:
        known = [budget for each in (await budgets.of_all(conn)).values() for budget in each]
    else:
        known = [*await budgets.of_tenant(conn, tenant_id)]
    uses: list[tuple[Budget, Period]] = []
    for budget in known:
        period = budget.period_at(now_ms)
        if budget.hardness == "hard" and period is not None:
            uses.append((budget, period))
    spent = await spend.spent_of(conn, uses)
    currencies = await prices.currencies(conn, {budget.tenant_id for budget, _ in uses}, now_ms)
    return [
        Cap(
            budget_id=budget.id,
            tenant_id=budget.tenant_id,
            key_id=budget.key_id,
            model=budget.model,
            tier=budget.tier,
            kind=budget.period,
            period=period,
            limit=budget.limit_at(now_ms),
            used=used,
            currency=currencies[budget.tenant_id],
        )
        for (budget, period), used in zip(uses, spent, strict=True)
    ]


async def _of_all(conn: AsyncConnection, now_ms: int) -> Sequence[Cap]:
    try:
        found = await spend_limits.get(conn, OPERATOR_TENANT, now_ms)
    except NotFoundError:
        return []
    month = spend_limits.month(now_ms)
    used = await spend_limits.spent_by_all(conn, month, found.currency)
    return [Cap(kind="month", period=month, limit=found.micro_units, used=used, currency=found.currency)]


def _nearness(cap: Cap, now_ms: int) -> tuple[bool, int, int]:
    reached_at_ms = cap.reached_at_ms(now_ms)
    left_in_millions = 0 if cap.limit <= 0 else (cap.limit - cap.used) * 1_000_000 // cap.limit
    return reached_at_ms is None, reached_at_ms or 0, left_in_millions
