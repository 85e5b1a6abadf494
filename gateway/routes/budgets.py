"""`/admin/v1/budgets` and `/admin/v1/quotas`: the limits of a tenant's spending and use. Operator keys only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiohttp import web
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database.paging import Page
from accounting.limits import budgets, quotas, spend
from accounting.prices import prices
from accounting.tenants import tenants
from accounting.values import clock
from accounting.values.budget_types import Budget, Quota
from gateway.base.lifecycle import uninterrupted
from gateway.http.route_table import Route
from gateway.http.sql import reading, writing
from gateway.idempotency import creations
from gateway.routes import admin, common
from gateway.schema import budgets as shapes
from gateway.schema import query
from gateway.schema.convert import convert
from gateway.schema.organization import deleted, page_of, reply

PATH = "/admin/v1/budgets"
ONE = f"{PATH}/{{budget_id}}"
QUOTAS = "/admin/v1/quotas"


async def create(request: web.Request) -> web.Response:
    """Creates a budget, once for each Idempotency-Key."""
    value = await common.stored_object(request)
    fields = convert(value, shapes.BudgetFields)

    async def create_in(conn: AsyncConnection) -> dict[str, Any]:
        await prices.check_currency(conn, fields.project_id, fields.currency, clock.now_ms())
        made = await budgets.create(conn, fields.new(), **admin.who(request))
        return await _shown_one(conn, made)

    return await _once(request, value, create_in)


async def list_all(request: web.Request) -> web.Response:
    """Lists the budgets."""
    async with reading(request) as conn:
        page = await budgets.list_budgets(
            conn, tenant_id=query.text(request.query, "project_id"), **query.page(request.query)
        )
        shown = Page(await _shown(conn, page.items), page.has_more)
    return reply(page_of(shown, lambda one: one))


async def get(request: web.Request) -> web.Response:
    """Shows a budget."""
    async with reading(request) as conn:
        return await _reply(conn, await budgets.get(conn, request.match_info["budget_id"]))


async def change(request: web.Request) -> web.Response:
    """Changes a budget."""
    fields = convert(await common.stored_object(request), shapes.BudgetChanges)
    async with writing(request) as conn:
        before = await budgets.get(conn, request.match_info["budget_id"])
        await prices.check_currency(conn, before.tenant_id, fields.currency, clock.now_ms())
        after = await budgets.change(
            conn,
            before.id,
            limit_micro_units=fields.limit_micro_units,
            hardness=fields.hardness(before.hardness),
            **admin.who(request),
        )
        return await _reply(conn, after)


async def delete(request: web.Request) -> web.Response:
    """Deletes a budget."""
    budget_id = request.match_info["budget_id"]
    async with writing(request) as conn:
        await budgets.delete(conn, budget_id, **admin.who(request))
    return reply(deleted(budget_id, "budget"))


async def adjust(request: web.Request) -> web.Response:
    """Raises or lowers the limit of a budget for a time, once for each Idempotency-Key."""
    value = await common.stored_object(request)
    fields = convert(value, shapes.NewAdjustment)

    async def adjust_in(conn: AsyncConnection) -> dict[str, Any]:
        before = await budgets.get(conn, request.match_info["budget_id"])
        await prices.check_currency(conn, before.tenant_id, fields.currency, clock.now_ms())
        after = await budgets.adjust(
            conn, before.id, fields.micro_units, fields.from_ * 1000, fields.to * 1000, **admin.who(request)
        )
        return await _shown_one(conn, after)

    return await _once(request, value, adjust_in)


async def list_quotas(request: web.Request) -> web.Response:
    """Lists the quotas."""
    tenant_id = query.text(request.query, "project_id") or ""
    async with reading(request) as conn:
        await tenants.get(conn, tenant_id)
        found = await quotas.of_tenant(conn, tenant_id)
    return reply({"object": "list", "data": [shapes.quota(tenant_id, one) for one in found]})


async def set_quota(request: web.Request) -> web.Response:
    """Sets a quota, or removes it where the limit is null."""
    fields = convert(await common.stored_object(request), shapes.QuotaFields)
    async with writing(request) as conn:
        if fields.limit is None:
            await quotas.remove(
                conn, fields.project_id, fields.level, fields.subject, fields.dimension, **admin.who(request)
            )
            return reply({"object": "quota.deleted", "deleted": True})
        quota = Quota(fields.level, fields.subject, fields.dimension, fields.limit, fields.shadow)
        await quotas.put(conn, fields.project_id, quota, **admin.who(request))
    return reply(shapes.quota(fields.project_id, quota))


async def _once(request: web.Request, value: dict[str, Any], create: creations.Create) -> web.Response:
    async def known_by() -> bytes:
        return (await common.fingerprint_of(request, request.path, value)).digest()

    made = creations.once(request, known_by, create, changes_identities=True)
    return creations.reply(*await uninterrupted(made))


async def _reply(conn: AsyncConnection, budget: Budget) -> web.Response:
    return reply(await _shown_one(conn, budget))


async def _shown_one(conn: AsyncConnection, budget: Budget) -> dict[str, Any]:
    return (await _shown(conn, [budget]))[0]


async def _shown(conn: AsyncConnection, found: Sequence[Budget]) -> list[dict[str, Any]]:
    now_ms = clock.now_ms()
    alerts = await spend.alerts(conn, [budget.id for budget in found])
    zones = await tenants.time_zones_of(conn, [budget.tenant_id for budget in found])
    currencies = await prices.currencies(conn, zones, now_ms)
    shown = []
    for budget in found:
        period = budget.period_at(now_ms)
        used = 0 if period is None else await spend.spent(conn, budget, period)
        shown.append(
            shapes.budget(
                budget, now_ms, used, alerts.get(budget.id, []), zones[budget.tenant_id], currencies[budget.tenant_id]
            )
        )
    return shown


ROUTES = [
    Route("POST", PATH, create, "admin", takes=shapes.BudgetFields),
    Route("GET", PATH, list_all, "admin"),
    Route("GET", ONE, get, "admin"),
    Route("PATCH", ONE, change, "admin", takes=shapes.BudgetChanges),
    Route("DELETE", ONE, delete, "admin"),
    Route("POST", f"{ONE}/adjustments", adjust, "admin", takes=shapes.NewAdjustment),
    Route("GET", QUOTAS, list_quotas, "admin"),
    Route("POST", QUOTAS, set_quota, "admin", takes=shapes.QuotaFields),
]
