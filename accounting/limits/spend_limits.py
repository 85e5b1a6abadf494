"""OpenAI's spend limits on top of budgets: a tenant's limit is a hard monthly budget, the operator's bounds the
spending of all tenants.

The limiter does not hold the operator's limit: gateways read the sum repeatedly and refuse new requests (`reached`).
A limit is in the currency that its tenant pays in. The operator's is in that of the standard price sheet, and counts what
tenants pay in it: amounts of several currencies have no sum.
"""

from __future__ import annotations

import msgspec
from sqlalchemy import Row, delete, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database import auth_epoch
from accounting.database.db import upsert
from accounting.limits import budgets, spend
from accounting.limits.budgets import NewBudget
from accounting.prices import prices
from accounting.tables.admin_models import SpendLimit
from accounting.tables.budget_models import BudgetRow
from accounting.tables.invoice_models import RollupMonth
from accounting.values.budget_types import Budget, Period
from accounting.values.currencies import written
from accounting.values.errors import InvalidError, NotFoundError
from accounting.values.types import OPERATOR_TENANT

MICRO_UNITS_PER_CENT = 10_000
"""A cent here is a hundredth of any currency: limits and alerts are stored in whole ones."""


class SpendLimitInfo(msgspec.Struct, frozen=True):
    micro_units: int
    currency: str
    enforcing: bool
    """The limit is reached, so new requests are refused now."""


async def get(conn: AsyncConnection, tenant_id: str, now_ms: int) -> SpendLimitInfo:
    """Returns the limit. Raises NotFoundError if none is set."""
    row = await _row(conn, tenant_id)
    if row is None:
        raise NotFoundError("No spend limit is set.")
    period, currency = month(now_ms), await prices.currency_of_tenant(conn, tenant_id, now_ms)
    if row.budget_id is None:
        limit = row.cents * MICRO_UNITS_PER_CENT
        spent = await spent_by_all(conn, period, currency)
        return SpendLimitInfo(limit, currency, spent >= limit)
    budget = await budgets.get(conn, row.budget_id)
    spent = await spend.spent(conn, budget, period)
    enforcing = budget.hardness == "hard" and spent >= budget.limit_at(now_ms)
    return SpendLimitInfo(budget.limit_micro_units, currency, enforcing)


async def put(conn: AsyncConnection, tenant_id: str, micro_units: int, *, now_ms: int, actor: str) -> SpendLimitInfo:
    """Sets the limit, in the currency that the tenant pays in. Raises InvalidError, NotFoundError."""
    now, cents, budget_id = now_ms // 1000, in_cents(micro_units), None
    if tenant_id == OPERATOR_TENANT:
        currency = await prices.currency_of_tenant(conn, tenant_id, now_ms)
        detail: dict[str, object] = {"amount": written(micro_units, currency), "currency": currency}
        await _record(conn, "updated", tenant_id, now, actor, detail)
    else:
        budget_id = await _put_budget(conn, tenant_id, micro_units, now, actor)
    values = {"cents": cents, "budget_id": budget_id}
    statement = upsert(conn, SpendLimit.__table__).values(tenant_id=tenant_id, **values)
    await conn.execute(statement.on_conflict_do_update(index_elements=["tenant_id"], set_=values))
    return await get(conn, tenant_id, now_ms)


async def _put_budget(conn: AsyncConnection, tenant_id: str, micro_units: int, now: int, actor: str) -> str:
    present = await _row(conn, tenant_id)
    if present is not None and present.budget_id is not None:
        changed = await budgets.change(
            conn, present.budget_id, limit_micro_units=micro_units, hardness="hard", now=now, actor=actor
        )
        return changed.id
    new = NewBudget(tenant_id=tenant_id, limit_micro_units=micro_units, period="month")
    return (await budgets.create(conn, new, now=now, actor=actor)).id


async def clear(conn: AsyncConnection, tenant_id: str, *, now: int, actor: str) -> None:
    """Deletes the limit. Raises NotFoundError if none is set."""
    row = await _row(conn, tenant_id)
    if row is None:
        raise NotFoundError("No spend limit is set.")
    if row.budget_id is None:
        await _record(conn, "deleted", tenant_id, now, actor, {})
    else:
        await budgets.delete(conn, row.budget_id, now=now, actor=actor)
    await conn.execute(delete(SpendLimit).where(SpendLimit.tenant_id == tenant_id))


async def reached(conn: AsyncConnection, now_ms: int) -> bool | None:
    """Says whether all tenants together have spent this month what the operator allows. None: there is no limit."""
    row = await _row(conn, OPERATOR_TENANT)
    if row is None:
        return None
    currency = await prices.currency_of_tenant(conn, OPERATOR_TENANT, now_ms)
    spent = await spent_by_all(conn, month(now_ms), currency)
    return bool(spent >= row.cents * MICRO_UNITS_PER_CENT)


async def spent_by_all(conn: AsyncConnection, period: Period, currency: str) -> int:
    """Returns the micro-units that all tenants of the currency, without the operator, settled in the period, which is a
    month of UTC. It reads the rows of that month alone, because gateways ask each second."""
    query = select(func.coalesce(func.sum(RollupMonth.charge), 0)).where(
        RollupMonth.bucket == period.start_ms // 1000,
        RollupMonth.currency == currency,
        RollupMonth.tenant_id != OPERATOR_TENANT,
    )
    return int(await conn.scalar(query) or 0)


def in_cents(micro_units: int) -> int:
    """Returns the amount in whole hundredths of its currency. Raises InvalidError if it has a part of one."""
    cents, rest = divmod(micro_units, MICRO_UNITS_PER_CENT)
    if rest:
        raise InvalidError("A limit or alert is a whole number of hundredths of its currency.", "amount")
    return cents


def month(now_ms: int) -> Period:
    """Returns the UTC month of that time."""
    period = Budget(id="", tenant_id="", period="month", limit_micro_units=0).period_at(now_ms)
    assert period is not None, "a month is never over"
    return period


async def _row(conn: AsyncConnection, tenant_id: str) -> Row[tuple[object, ...]] | None:
    """Returns the row, or None if no limit is set or somebody deleted its budget."""
    query = (
        select(SpendLimit.__table__)
        .outerjoin(BudgetRow, BudgetRow.id == SpendLimit.budget_id)
        .where(SpendLimit.tenant_id == tenant_id, BudgetRow.deleted_at.is_(None))
    )
    return (await conn.execute(query)).first()


async def _record(
    conn: AsyncConnection, verb: str, tenant_id: str, now: int, actor: str, detail: dict[str, object]
) -> None:
    await auth_epoch.record(
        conn, f"headgate.spend_limit.{verb}", actor=actor, now=now, object_id=tenant_id, detail=detail
    )
