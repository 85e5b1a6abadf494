"""`/admin/v1/webhooks`: the receivers of events. Operator keys only.

Nothing is sent from here: a test is an event like others, which the jobs process delivers.
"""

from __future__ import annotations

from aiohttp import web

from accounting.events import webhooks
from accounting.values import clock
from accounting.values.types import OPERATOR_TENANT
from gateway.base.app_keys import SETTINGS
from gateway.http.sql import reading, writing
from gateway.routes.admin import actor, fields, now, part, route
from gateway.schema import query
from gateway.schema import webhooks as shapes
from gateway.schema.organization import deleted, page_of, reply

PATH = "/admin/v1/webhooks"
ONE = f"{PATH}/{{webhook_id}}"


async def create(request: web.Request) -> web.Response:
    asked = await fields(request, shapes.WebhookFields)
    settings = request.app[SETTINGS]
    async with writing(request, changes_identities=False) as conn:
        made = await webhooks.create(
            conn,
            settings.secret("master.key"),
            settings.egress,
            url=asked.url,
            types=asked.events,
            tenant_id=asked.project_id or OPERATOR_TENANT,
            now=now(),
            actor=actor(request),
        )
    return reply(shapes.new_webhook(made))


async def list_all(request: web.Request) -> web.Response:
    async with reading(request) as conn:
        page = await webhooks.list_webhooks(
            conn,
            tenant_id=query.text(request.query, "project_id"),
            after=query.text(request.query, "after"),
            limit=query.limit(request.query, 20, 100),
        )
    return reply(page_of(page, shapes.webhook))


async def get(request: web.Request) -> web.Response:
    async with reading(request) as conn:
        return reply(shapes.webhook(await webhooks.get(conn, part(request, "webhook_id"))))


async def delete(request: web.Request) -> web.Response:
    webhook_id = part(request, "webhook_id")
    async with writing(request, changes_identities=False) as conn:
        await webhooks.remove(conn, webhook_id, now=now(), actor=actor(request))
    return reply(deleted(webhook_id, "webhook"))


async def test(request: web.Request) -> web.Response:
    webhook_id = part(request, "webhook_id")
    async with writing(request, changes_identities=False) as conn:
        event_id = await webhooks.test(conn, webhook_id, now_ms=clock.now_ms(), actor=actor(request))
    return reply({"id": event_id, "object": "webhook.test", "webhook_id": webhook_id})


async def list_deliveries(request: web.Request) -> web.Response:
    """List the latest deliveries, or the one of one event."""
    async with reading(request) as conn:
        found = await webhooks.list_deliveries(
            conn,
            part(request, "webhook_id"),
            state=query.choice(request.query, "state", ("pending", "delivered", "dead")),
            event_id=query.text(request.query, "event_id"),
            limit=query.limit(request.query, 20, 100),
        )
    return reply({"object": "list", "data": [shapes.delivery(one) for one in found]})


ROUTES = [
    route("POST", PATH, create, shapes.WebhookFields),
    route("GET", PATH, list_all),
    route("GET", ONE, get),
    route("DELETE", ONE, delete),
    route("POST", f"{ONE}/test", test),
    route("GET", f"{ONE}/deliveries", list_deliveries),
]
