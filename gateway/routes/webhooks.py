"""The receivers of events: `/admin/v1/webhooks` for the operator, `/v1/webhooks` for a tenant's own.

A tenant's key needs the scope `keys`, which makes it an administrator's, and `usage:read`, because events tell what was
used. It sees the webhooks that it made, which go to public addresses only. Nothing is sent from here: a test is an event like others, which the jobs process delivers.
"""

from __future__ import annotations

from functools import partial

from aiohttp import web
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.access import delegation
from accounting.events import webhooks
from accounting.events.egress import PlaceError
from accounting.events.webhooks import WebhookInfo
from accounting.values import clock
from accounting.values.errors import NotFoundError
from accounting.values.types import OPERATOR_TENANT
from gateway.base import errors
from gateway.base.app_keys import SETTINGS
from gateway.http.auth import PRINCIPAL
from gateway.http.route_table import Route, Scope
from gateway.http.sql import reading, writing
from gateway.routes.admin import actor, fields, part, route, who
from gateway.routes.keys import unbounded_holder
from gateway.schema import query
from gateway.schema import webhooks as shapes
from gateway.schema.organization import deleted, page_of, reply

_OWN_NETWORKS = "HEADGATE_WEBHOOK_ALLOWED_NETWORKS permits networks of your own, without TLS too."


async def create(request: web.Request) -> web.Response:
    """Creates a webhook."""
    owner = _owner(request)
    asked = await fields(request, shapes.WebhookFields)
    if owner is not None and asked.project_id not in {None, owner}:
        raise errors.not_found()
    settings = request.app[SETTINGS]
    async with writing(request, changes_identities=False) as conn:
        # A webhook is not bound by what binds the key that makes it.
        if (holder := await unbounded_holder(request, conn)) is not None:
            delegation.check_lasting(holder)
        try:
            made = await webhooks.create(
                conn,
                settings.secret("master.key"),
                settings.egress,
                url=asked.url,
                types=asked.events,
                tenant_id=owner or asked.project_id or OPERATOR_TENANT,
                is_tenants=owner is not None,
                **who(request),
            )
        except PlaceError as error:
            raise errors.invalid(str(error) if owner else f"{error} {_OWN_NETWORKS}", error.param) from None
    return reply(shapes.new_webhook(made))


async def list_all(request: web.Request) -> web.Response:
    """Lists the webhooks."""
    owner = _owner(request)
    tenant_id = owner or query.text(request.query, "project_id")
    async with reading(request) as conn:
        page = await webhooks.list_webhooks(
            conn, tenant_id=tenant_id, only_tenants=owner is not None, **query.page(request.query)
        )
    return reply(page_of(page, shapes.webhook))


async def get(request: web.Request) -> web.Response:
    """Shows a webhook."""
    async with reading(request) as conn:
        return reply(shapes.webhook(await _named(request, conn)))


async def delete(request: web.Request) -> web.Response:
    """Deletes a webhook."""
    async with writing(request, changes_identities=False) as conn:
        found = await _named(request, conn)
        await webhooks.remove(conn, found.id, **who(request))
    return reply(deleted(found.id, "webhook"))


async def test(request: web.Request) -> web.Response:
    """Sends a test event to a webhook."""
    async with writing(request, changes_identities=False) as conn:
        found = await _named(request, conn)
        event_id = await webhooks.test(conn, found.id, now_ms=clock.now_ms(), actor=actor(request))
    return reply({"id": event_id, "object": "webhook.test", "webhook_id": found.id})


async def list_deliveries(request: web.Request) -> web.Response:
    """Lists the latest deliveries, or the one of one event."""
    async with reading(request) as conn:
        found = await webhooks.list_deliveries(
            conn,
            (await _named(request, conn)).id,
            state=query.choice(request.query, "state", ("pending", "delivered", "dead")),
            event_id=query.text(request.query, "event_id"),
            limit=query.limit(request.query, 20, 100),
        )
    return reply({"object": "list", "data": [shapes.delivery(one) for one in found]})


def _owner(request: web.Request) -> str | None:
    """Returns the tenant whose webhooks the caller may see. None stands for all tenants. Raises `ApiError` 403."""
    principal = request[PRINCIPAL]
    if principal.kind == "operator":
        return None
    if "usage:read" not in principal.scopes:
        raise errors.forbidden("insufficient_scope", "This API key may not do this.")
    return principal.tenant_id


async def _named(request: web.Request, conn: AsyncConnection) -> WebhookInfo:
    """Returns the webhook that the path names. Raises NotFoundError, also for another tenant's and for one that the
    operator made.
    """
    owner = _owner(request)
    found = await webhooks.get(conn, part(request, "webhook_id"))
    if owner is not None and not (found.is_tenants and found.tenant_id == owner):
        raise NotFoundError
    return found


def _routes(root: str, scope: Scope) -> list[Route]:
    webhook = root + "/{webhook_id}"
    one = partial(route, scope=scope)
    return [
        one("POST", root, create, shapes.WebhookFields),
        one("GET", root, list_all),
        one("GET", webhook, get),
        one("DELETE", webhook, delete),
        one("POST", f"{webhook}/test", test),
        one("GET", f"{webhook}/deliveries", list_deliveries),
    ]


ROUTES = [*_routes("/admin/v1/webhooks", "admin"), *_routes("/v1/webhooks", "keys")]
