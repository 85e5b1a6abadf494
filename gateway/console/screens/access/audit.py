"""The audit log: who changed what and when, by filters, and as a file."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web

from gateway.console import choices, pages
from gateway.console.tables import Column, Table, next_page
from gateway.console.viewer import Viewer

FILTERS: dict[str, str] = {
    "event_types": "Change",
    "project_ids": "Tenant",
    "actor_ids": "Who",
    "resource_ids": "Object",
}
DAYS: dict[str, str] = {"": "all time", "1": "24 hours", "7": "7 days", "30": "30 days", "365": "365 days"}
DAY_S = 86_400
PAGE_ROWS = 100


async def list_entries(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    asked: dict[str, Any] = {name: choices.entries(request.query.get(name)) for name in FILTERS}
    days = choices.number(request.query.get("days"))
    if isinstance(days, int):
        asked["effective_at[gte]"] = int(time.time()) - days * DAY_S
    found = await viewer.listed("/v1/organization/audit_logs", PAGE_ROWS, **asked)
    table = Table("audit", _COLUMNS, [_row(one) for one in found["data"]], _EMPTY, next_page(found))
    return pages.show(request, viewer, "audit.html", table=table, filters=FILTERS, days=DAYS)


def _row(one: Mapping[str, Any]) -> dict[str, Any]:
    details = dict(one[one["type"]])
    target = details.pop("id")
    actor = one["actor"]
    project = one.get("project", {})
    return {
        "effective_at": one["effective_at"],
        "type": one["type"],
        "actor": actor["api_key"]["id"] if "api_key" in actor else actor["session"]["user"]["id"],
        "project": project.get("name"),
        "project_id": project.get("id"),
        "object": target,
        "details": msgspec.json.encode(details).decode() if details else "",
        "id": one["id"],
    }


def _key_page(name: str) -> Any:
    def link(row: Mapping[str, Any]) -> str | None:
        is_gone = name == "object" and row["type"] == "api_key.deleted"
        return f"{pages.ROOT}/keys/{row[name]}" if str(row[name]).startswith("key_") and not is_gone else None

    return link


_EMPTY = "No change was found. Widen the filters, or make a change."
_COLUMNS: Sequence[Column] = (
    Column("effective_at", "Time", "moment"),
    Column("type", "Change"),
    Column("actor", "Who", "code", link=_key_page("actor")),
    Column("project", "Tenant", link=choices.tenant_page),
    Column("object", "Object", "code", link=_key_page("object")),
    Column("details", "Details", "code"),
    Column("id", "Entry", "code"),
)

ROUTES = [pages.get("/audit", list_entries)]
