"""Budgets: created, read, changed, adjusted, deleted. Every change raises the auth epoch and is audited.

spend.py sums what has been spent of a budget; the limiter knows what is left.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cache
from typing import Any

import msgspec
from sqlalchemy import Row, bindparam, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database import auth_epoch
from accounting.database.auth_epoch import SYSTEM
from accounting.database.db import among_given, given
from accounting.database.driver_selects import select_together
from accounting.database.paging import Page, newest_first, one
from accounting.tables.budget_models import BudgetAdjustment, BudgetRow
from accounting.tables.models import ApiKey
from accounting.tenants import tenants
from accounting.values.budget_types import MAX_AMOUNT, Adjustment, Budget, Hardness, PeriodKind
from accounting.values.errors import ConflictError, InvalidError
from accounting.values.ids import new_id

MAX_PER_TENANT = 100
"""The most budgets in force: the limiter checks each budget that binds a request."""
MAX_ADJUSTMENTS = 100
MINUTE_MS = 60_000

_FIELDS = [name for name in Budget.__struct_fields__ if name != "adjustments"]
_COLUMNS = [getattr(BudgetRow, name) for name in _FIELDS]


class NewBudget(msgspec.Struct, frozen=True, kw_only=True):
    tenant_id: str
    limit_micro_units: int
    period: PeriodKind
    start_ms: int = 0
    end_ms: int = 0
    key_id: str | None = None
    model: str | None = None
    tier: str | None = None
    hardness: Hardness = "hard"


async def create(conn: AsyncConnection, new: NewBudget, *, now: int, actor: str = SYSTEM) -> Budget:
    """Creates a budget. Raises NotFoundError, InvalidError, ConflictError."""
    await tenants.living(conn, new.tenant_id)
    await _check_key(conn, new)
    _check_period(new)
    _check_amount(new.limit_micro_units, "limit_micro_units")
    if len(await of_tenant(conn, new.tenant_id)) >= MAX_PER_TENANT:
        raise ConflictError(f"A project has at most {MAX_PER_TENANT} budgets.")
    budget_id = new_id("budget")
    values = msgspec.structs.asdict(new)
    version = await auth_epoch.record(
        conn,
        "headgate.budget.created",
        actor=actor,
        now=now,
        tenant_id=new.tenant_id,
        object_id=budget_id,
        detail=values,
    )
    await conn.execute(insert(BudgetRow).values(id=budget_id, created_at=now, version=version, **values))
    return await get(conn, budget_id)


async def get(conn: AsyncConnection, budget_id: str) -> Budget:
    row = await one(conn, _living().where(BudgetRow.id == budget_id), "There is no such budget.")
    return (await _with_adjustments(conn, [row]))[0]


async def of_tenant(conn: AsyncConnection, tenant_id: str) -> tuple[Budget, ...]:
    """Returns all budgets of the tenant in force, oldest first."""
    named = {"tenant_id": tenant_id}
    rows = (await conn.execute(OF_TENANT, named)).all()
    return tuple(whole(rows, await conn.execute(ADJUSTMENTS, named)) if rows else ())


async def of_tenants(conn: AsyncConnection, tenant_ids: Collection[str]) -> dict[str, list[Budget]]:
    named = given(conn, tenant_ids)
    return by_tenant(whole(*await select_together(conn, named, *of_given_tenants(conn.dialect.name))))


@cache
def of_given_tenants(dialect: str) -> tuple[Any, Any]:
    """Returns the statements of the budgets in force of these tenants (`given`), and of those budgets' adjustments."""
    mine = among_given(dialect, BudgetRow.tenant_id)
    return _in_order(_living().where(mine)), _adjustments().where(mine)


def _in_order(query: Any) -> Any:
    return query.order_by(BudgetRow.created_at, BudgetRow.id)


def by_tenant(budgets: Iterable[Budget]) -> dict[str, list[Budget]]:
    found: dict[str, list[Budget]] = {}
    for budget in budgets:
        found.setdefault(budget.tenant_id, []).append(budget)
    return found


async def of_all(conn: AsyncConnection) -> dict[str, list[Budget]]:
    """Returns the budgets in force of every tenant, by tenant."""
    return by_tenant(await _with_adjustments(conn, (await conn.execute(_in_order(_living()))).all()))


async def list_budgets(
    conn: AsyncConnection, *, tenant_id: str | None = None, after: str | None = None, limit: int = 20
) -> Page[Budget]:
    query, ever = _living(), select(*_COLUMNS)
    if tenant_id is not None:
        mine = BudgetRow.tenant_id == tenant_id
        query, ever = query.where(mine), ever.where(mine)
    page = await newest_first(conn, query, BudgetRow, after, limit, ever=ever)
    return Page(await _with_adjustments(conn, page.items), page.has_more)


async def change(
    conn: AsyncConnection,
    budget_id: str,
    *,
    limit_micro_units: int | None = None,
    hardness: Hardness | None = None,
    now: int,
    actor: str = SYSTEM,
) -> Budget:
    """Changes a budget. A value of None is not changed. Scope and period cannot be changed: that would be another
    budget."""
    budget = await get(conn, budget_id)
    values: dict[str, Any] = {}
    if limit_micro_units is not None:
        values["limit_micro_units"] = _check_amount(limit_micro_units, "limit_micro_units")
    if hardness is not None:
        values["hardness"] = hardness
    await _write(conn, budget, "updated", values, values, now, actor)
    return await get(conn, budget_id)


async def delete(conn: AsyncConnection, budget_id: str, *, now: int, actor: str = SYSTEM) -> Budget:
    """Deletes a budget. It binds no request any more; alerts that were due stay."""
    budget = await get(conn, budget_id)
    await _write(conn, budget, "deleted", {"deleted_at": now}, {}, now, actor)
    return budget


async def adjust(
    conn: AsyncConnection,
    budget_id: str,
    micro_units: int,
    from_ms: int,
    until_ms: int,
    *,
    now: int,
    actor: str = SYSTEM,
) -> Budget:
    """Changes the limit by `micro_units` from `from_ms` until `until_ms`."""
    budget = await get(conn, budget_id)
    _check_amount(abs(micro_units), "micro_units")
    if not 0 <= from_ms < until_ms <= MAX_AMOUNT:
        raise InvalidError("An adjustment must end after it begins.", "to")
    if len(budget.adjustments) >= MAX_ADJUSTMENTS:
        raise ConflictError(f"A budget has at most {MAX_ADJUSTMENTS} adjustments.")
    detail = {"micro_units": micro_units, "from_ms": from_ms, "until_ms": until_ms}
    await conn.execute(insert(BudgetAdjustment).values(id=new_id("adj"), budget_id=budget_id, created_at=now, **detail))
    await _write(conn, budget, "adjusted", {}, detail, now, actor)
    return await get(conn, budget_id)


async def _write(
    conn: AsyncConnection,
    budget: Budget,
    verb: str,
    values: dict[str, Any],
    detail: dict[str, Any],
    now: int,
    actor: str,
) -> None:
    version = await auth_epoch.record(
        conn,
        f"headgate.budget.{verb}",
        actor=actor,
        now=now,
        tenant_id=budget.tenant_id,
        object_id=budget.id,
        detail=detail,
    )
    changed = update(BudgetRow).where(BudgetRow.id == budget.id)
    await conn.execute(changed.values(**values, version=version))


async def _check_key(conn: AsyncConnection, new: NewBudget) -> None:
    if new.key_id is None:
        return
    mine = select(ApiKey.id).where(ApiKey.id == new.key_id, ApiKey.tenant_id == new.tenant_id)
    if await conn.scalar(mine) is None:
        raise InvalidError("The project has no such api key.", "api_key_id")


def _check_period(new: NewBudget) -> None:
    """Checks that a fixed period has whole minutes, as the minute's rollups are the finest sums of spending. Raises
    InvalidError."""
    if new.period != "fixed":
        return
    if not 0 <= new.start_ms < new.end_ms <= MAX_AMOUNT:
        raise InvalidError("A fixed period must end after it begins.", "period.end")
    if new.start_ms % MINUTE_MS or new.end_ms % MINUTE_MS:
        raise InvalidError("A fixed period begins and ends on whole minutes.", "period.start")


def _check_amount(amount: int, param: str) -> int:
    if not 0 <= amount <= MAX_AMOUNT:
        raise InvalidError(f"An amount must be 0 to {MAX_AMOUNT} micro-units.", param)
    return amount


def _living() -> Any:
    return select(*_COLUMNS).where(BudgetRow.deleted_at.is_(None))


async def _with_adjustments(conn: AsyncConnection, rows: Sequence[Row[Any]]) -> list[Budget]:
    if not rows:
        return []
    adjustments = await conn.execute(_adjustments_of(conn.dialect.name), given(conn, [row.id for row in rows]))
    return whole(rows, adjustments)


@cache
def _adjustments_of(dialect: str) -> Any:
    table = BudgetAdjustment
    query = select(table.__table__).where(among_given(dialect, table.budget_id))
    return query.order_by(table.from_ms, table.id)


def whole(rows: Sequence[Row[Any]], adjustments: Iterable[Row[Any]]) -> list[Budget]:
    """Returns the budgets of these rows, as `OF_TENANT` selects them, with their adjustments, as `ADJUSTMENTS` does."""
    found: dict[str, list[Adjustment]] = {}
    for row in adjustments:
        found.setdefault(row.budget_id, []).append(Adjustment(row.id, row.micro_units, row.from_ms, row.until_ms))
    return [Budget(**dict(zip(_FIELDS, row, strict=True)), adjustments=tuple(found.get(row.id, ()))) for row in rows]


def _adjustments() -> Any:
    """Selects the adjustments of living budgets."""
    query = select(BudgetAdjustment.__table__).join(BudgetRow, BudgetRow.id == BudgetAdjustment.budget_id)
    return query.where(BudgetRow.deleted_at.is_(None)).order_by(BudgetAdjustment.from_ms, BudgetAdjustment.id)


OF_TENANT = _in_order(_living().where(BudgetRow.tenant_id == bindparam("tenant_id")))
ADJUSTMENTS = _adjustments().where(BudgetRow.tenant_id == bindparam("tenant_id"))
