"""The webhooks: who is told of events and alerts, deliveries with their tries, and forms to add, test and delete."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohttp import web

from accounting.events import events
from gateway.console import pages
from gateway.console.calls import Refused
from gateway.console.tables import Column, Table
from gateway.console.viewer import Viewer

PATH = "/admin/v1/webhooks"
STATES = ("", "pending", "delivered", "dead")


async def list_webhooks(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    return await _show_all(request, viewer, {"url": "", "project_id": "", "events": []})


async def create(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    form = await pages.fields_of(request)
    values = {"url": form.get("url", ""), "project_id": form.get("project_id", ""), "events": form.getall("events", [])}
    body = {"url": values["url"], "project_id": values["project_id"] or None, "events": values["events"] or None}
    try:
        made = await viewer.post(PATH, body)
    except Refused as refused:
        return await _show_all(request, viewer, values, refused)
    # The secret is shown here and nowhere else, so this page is the answer to the form itself.
    return pages.show(request, viewer, "webhook_made.html", made=made)


async def show_webhook(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    path = f"{PATH}/{request.match_info['id']}"
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
    webhook_id = request.match_info["id"]
    event = await viewer.post(f"{PATH}/{webhook_id}/test", {})
    return pages.see_other(f"/webhooks/{webhook_id}", sent=event["id"])


async def delete(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    await viewer.delete(f"{PATH}/{request.match_info['id']}")
    return pages.see_other("/webhooks")


async def _show_all(
    request: web.Request, viewer: Viewer, values: Mapping[str, Any], refused: Refused | None = None
) -> web.Response:
    found = await viewer.get(PATH, limit=100, after=request.query.get("after"))
    following = {"after": found["last_id"]} if found["has_more"] else {}
    page = pages.show(
        request,
        viewer,
        "webhooks.html",
        table=Table("webhooks", _WEBHOOKS, [_webhook(one) for one in found["data"]], _NONE, following),
        types=sorted(events.TYPES),
        values=values,
        message=refused and refused.message,
    )
    if refused is not None:
        page.set_status(refused.status)
    return page


_NONE = "Nobody is told of events. Add a receiver with the form below."
_WEBHOOKS = (
    Column("id", "Webhook", "code", link=lambda row: f"{pages.ROOT}/webhooks/{row['id']}"),
    Column("url", "URL"),
    Column("project_id", "Tenant", "code"),
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
