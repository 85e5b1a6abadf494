"""The doctor: what is ready and what is missing, versions, and the settings of the gateway that answers."""

from __future__ import annotations

import json

from aiohttp import web

from gateway.console import pages
from gateway.console.tables import Column, Table
from gateway.console.viewer import Viewer

_CHECKS = (Column("name", "Check"), Column("state", "State", "state"), Column("message", "What to know", "words"))
_SETTINGS = (Column("name", "Variable"), Column("value", "Value", "words"), Column("set", "Set by the operator"))


async def show_doctor(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    found = await viewer.get("/admin/v1/settings")
    answer = await viewer.forward("GET", "/readyz")
    ready = json.loads(answer.text or "{}") if isinstance(answer, web.Response) else {}
    checks = [{"message": "", "state": "ok", **check} for check in ready.get("checks", [])]
    checks.append(
        {
            "name": "migrations",
            "state": "ok" if found["migrations"]["in_step"] else "failing",
            "message": found["migrations"]["message"] or "",
        }
    )
    settings = [{**one, "set": "yes" if one["is_set"] else ""} for one in found["data"]]
    tables = {"checks": Table("checks", _CHECKS, checks, ""), "settings": Table("settings", _SETTINGS, settings, "")}
    return pages.show(
        request,
        viewer,
        "doctor.html",
        table=tables.get(request.query.get("table", "")),
        readiness=ready.get("status", "unknown"),
        found=found,
        checks=tables["checks"],
        settings=tables["settings"],
    )


ROUTES = [pages.get("/doctor", show_doctor)]
