"""`spend_limit` and `spend_alerts`, of a project and of the organization: one set of handlers, whose scope is in the
path.
"""

from __future__ import annotations

from aiohttp import web
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.limits import spend_alerts, spend_limits
from accounting.prices import prices
from accounting.tenants import tenants
from accounting.values import clock
from accounting.values.types import OPERATOR_TENANT
from gateway.http.route_table import Route
from gateway.http.sql import reading, writing
from gateway.routes import admin
from gateway.routes.admin import PROJECT, route
from gateway.schema import query
from gateway.schema import spending as shapes
from gateway.schema.organization import deleted, page_of, reply
from gateway.schema.spending import Scope

ORGANIZATION = "/v1/organization"


async def get_limit(request: web.Request) -> web.Response:
    """Shows the spend limit of the project or organization."""
    async with reading(request) as conn:
        await _known(request, conn)
        found = await spend_limits.get(conn, _owner(request), clock.now_ms())
    return reply(shapes.spend_limit(_scope(request), found))


async def put_limit(request: web.Request) -> web.Response:
    """Sets the spend limit of the project or organization."""
    fields = await admin.fields(request, shapes.SpendLimitFields)
    async with writing(request) as conn:
        currency = await _currency(request, conn, fields.currency)
        limit = fields.micro_units(currency)
        found = await spend_limits.put(conn, _owner(request), limit, now_ms=clock.now_ms(), actor=admin.actor(request))
    return reply(shapes.spend_limit(_scope(request), found))


async def delete_limit(request: web.Request) -> web.Response:
    """Removes the spend limit of the project or organization."""
    async with writing(request) as conn:
        await _known(request, conn)
        await spend_limits.clear(conn, _owner(request), **admin.who(request))
    return reply({"object": f"{_scope(request)}.spend_limit.deleted", "deleted": True})


async def create_alert(request: web.Request) -> web.Response:
    """Creates a spend alert of the project or organization."""
    fields = await admin.fields(request, shapes.SpendAlertFields)
    async with writing(request, changes_identities=False) as conn:
        currency = await _currency(request, conn, fields.currency)
        alert = await spend_alerts.create(conn, _owner(request), fields.alert(currency), **admin.who(request))
    return reply(shapes.spend_alert(_scope(request), alert, currency))


async def list_alerts(request: web.Request) -> web.Response:
    """Lists the spend alerts of the project or organization."""
    async with reading(request) as conn:
        currency = await _currency(request, conn)
        page = await spend_alerts.list_alerts(
            conn,
            _owner(request),
            **query.page(request.query),
            oldest_first=query.choice(request.query, "order", ("asc", "desc")) == "asc",
        )
    scope = _scope(request)
    return reply(page_of(page, lambda alert: shapes.spend_alert(scope, alert, currency)))


async def get_alert(request: web.Request) -> web.Response:
    """Shows a spend alert of the project or organization."""
    async with reading(request) as conn:
        currency = await _currency(request, conn)
        alert = await spend_alerts.get(conn, _owner(request), admin.part(request, "alert_id"))
    return reply(shapes.spend_alert(_scope(request), alert, currency))


async def update_alert(request: web.Request) -> web.Response:
    """Changes a spend alert of the project or organization."""
    fields = await admin.fields(request, shapes.SpendAlertFields)
    async with writing(request, changes_identities=False) as conn:
        currency = await _currency(request, conn, fields.currency)
        alert = await spend_alerts.change(
            conn, _owner(request), admin.part(request, "alert_id"), fields.alert(currency), **admin.who(request)
        )
    return reply(shapes.spend_alert(_scope(request), alert, currency))


async def delete_alert(request: web.Request) -> web.Response:
    """Deletes a spend alert of the project or organization."""
    alert_id = admin.part(request, "alert_id")
    async with writing(request, changes_identities=False) as conn:
        await _known(request, conn)
        await spend_alerts.delete(conn, _owner(request), alert_id, **admin.who(request))
    return reply(deleted(alert_id, f"{_scope(request)}.spend_alert"))


async def _known(request: web.Request, conn: AsyncConnection) -> None:
    """Checks that the scope exists. Raises NotFoundError for a project that does not exist."""
    if _scope(request) == "project":
        await tenants.get(conn, admin.project(request))


async def _currency(request: web.Request, conn: AsyncConnection, given: str | None = None) -> str:
    """Returns the currency of the scope. Raises NotFoundError, and InvalidError if `given` is another one."""
    await _known(request, conn)
    return await prices.check_currency(conn, _owner(request), given, clock.now_ms())


def _scope(request: web.Request) -> Scope:
    return "project" if "project_id" in request.match_info else "organization"


def _owner(request: web.Request) -> str:
    return request.match_info.get("project_id", OPERATOR_TENANT)


def _routes(root: str) -> list[Route]:
    limit, alerts = f"{root}/spend_limit", f"{root}/spend_alerts"
    alert = alerts + "/{alert_id}"
    return [
        route("GET", limit, get_limit),
        route("POST", limit, put_limit, shapes.SpendLimitFields),
        route("DELETE", limit, delete_limit),
        route("GET", alerts, list_alerts),
        route("POST", alerts, create_alert, shapes.SpendAlertFields),
        route("GET", alert, get_alert),
        route("POST", alert, update_alert, shapes.SpendAlertFields),
        route("DELETE", alert, delete_alert),
    ]


ROUTES = [*_routes(PROJECT), *_routes(ORGANIZATION)]
