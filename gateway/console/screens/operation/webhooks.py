"""The webhooks: who is told of events and alerts, deliveries with their tries, and forms to add, test and delete. A
tenant's administrator has its own tenant's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohttp import web

from accounting.events import events
from gateway.console import choices, pages
from gateway.console.calls import Refused
from gateway.console.tables import Column, Table, next_page
from gateway.console.viewer import Viewer

EMPTY_FORM: Mapping[str, Any] = {"url": "", "project_id": "", "events": ()}
PAGE_ROWS = 100
STATES = ("", "pending", "delivered", "dead")


async def create(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    form = await pages.fields_of(request)
    values = {"url": form.get("url", ""), "project_id": form.get("project_id", ""), "events": form.getall("events", [])}
    body = {"url": values["url"], "project_id": values["project_id"] or None, "events": values["events"] or None}
    try:
        made = await viewer.post(viewer.own("webhooks"), body)
    except Refused as refused:
        return await list_webhooks(request, viewer, values, refused)
    # The secret is shown here and nowhere else, so this page is the answer to the form itself.
    return pages.show(request, viewer, "webhook_made.html", made=made)


async def show_webhook(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    path = _one(request, viewer)
    found = await viewer.get(path)
    deliveries = await viewer.get(f"{path}/deliveries", limit=100, state=request.query.get("state"))
    return pages.show(
        request,
        viewer,
        "webhook.html",
        found=found,
        states=STATES,
        table=Table("deliveries", _DELIVERIES, deliveries["data"], "Nothing is stored here. Send a test event."),
    )


async def test(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    webhook_id = pages.part(request, "id")
    event = await viewer.post(f"{_one(request, viewer)}/test", {})
    return pages.see_other(f"/webhooks/{webhook_id}", sent=event["id"])


async def delete(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    await viewer.delete(_one(request, viewer))
    return pages.see_other("/webhooks")


async def list_webhooks(
    request: web.Request, viewer: Viewer, values: Mapping[str, Any] = EMPTY_FORM, refused: Refused | None = None
) -> web.StreamResponse:
    reads = viewer.sees_all or viewer.principal.scopes >= {"keys", "usage:read"}
    table = None
    if reads:
        found = await viewer.listed(viewer.own("webhooks"), PAGE_ROWS)
        rows = [_webhook(one) for one in found["data"]]
        empty = f"{_NONE} Add a receiver with the form below." if viewer.may_change else _NONE
        table = Table("webhooks", choices.columns_for(viewer, _WEBHOOKS), rows, empty, next_page(found))
    return pages.show(
        request,
        viewer,
        "webhooks.html",
        table=table,
        reads=reads,
        types=sorted(events.TYPES),
        values=values,
        refused=refused,
    )


def _one(request: web.Request, viewer: Viewer) -> str:
    return viewer.own(f"webhooks/{pages.part(request, 'id')}")


_NONE = "Nobody is told of events."
_WEBHOOKS = (
    Column("id", "Webhook", "code", link=lambda row: f"{pages.ROOT}/webhooks/{row['id']}"),
    Column("url", "URL"),
    Column("project_id", "Tenant", "code", names_tenant=True),
    Column("told", "Events"),
    Column("pending", "Waiting", "count"),
    Column("delivered", "Delivered", "count"),
    Column("dead", "Given up", "count"),
    Column("last_error", "Last error"),
    Column("created_at", "Added", "moment"),
)
_DELIVERIES = (
    Column("id", "Event", "code"),
    Column("type", "Type"),
    Column("state", "State", "state"),
    Column("attempts", "Tries", "count"),
    Column("last_error", "Last error"),
    Column("created_at", "Happened", "moment"),
    Column("next_try_at", "Next try", "moment"),
)


def _webhook(one: Mapping[str, Any]) -> dict[str, Any]:
    told = "all" if one["events"] is None else ", ".join(one["events"])
    return {**one, **one["deliveries"], "told": told + (" (full: nothing new is noted)" if one["full"] else "")}


ROUTES = [
    pages.get("/webhooks", list_webhooks),
    pages.post("/webhooks", create),
    pages.get("/webhooks/{id}", show_webhook),
    pages.post("/webhooks/{id}/test", test),
    pages.post("/webhooks/{id}/delete", delete),
]
