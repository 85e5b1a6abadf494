"""Fairness: the share of busy workers that each tenant received against the one promised, its waits, its refusals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohttp import web

from gateway.console import charts, choices, pages
from gateway.console.tables import Column, Table
from gateway.console.viewer import Viewer

TIERS = ("interactive", "batch")
NUM_BARS = 20


async def show_fairness(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    asked = choices.asked(request, ("minutes", "tier"))
    found = await viewer.get("/admin/v1/fairness", **asked)
    tenants = await choices.named(viewer, found["tenants"])
    refusals = await choices.named(viewer, found["refusals"])
    tables = {
        "shares": Table("fairness", _SHARES, tenants, _NOBODY),
        "refusals": Table("refusals", _REFUSALS, refusals, "Nobody was refused in these minutes."),
    }
    shares = [share for one in found["tenants"] for share in (one["promised_share"], one["received_share"])]
    return pages.show(
        request,
        viewer,
        "fairness.html",
        found=found,
        tiers=TIERS,
        tables=tables,
        bars=[_bars(one, max(shares)) for one in tenants[:NUM_BARS]],
    )


def _bars(one: Mapping[str, Any], longest: float) -> Mapping[str, Any]:
    return {
        "project_id": one["project_id"],
        "name": one["tenant"],
        "received": one["received_share"],
        "promised": one["promised_share"],
        "received_line": charts.line_of([("received", one["received_share"])], longest),
        "promised_line": charts.line_of([("", 0.0), ("promised", one["promised_share"])], longest),
    }


_NOBODY = "Nobody was served in these minutes. Send a request, or ask for more minutes."
_SHARES = (
    choices.TENANT,
    Column("weight", "Weight"),
    Column("promised_share", "Promised", "share"),
    Column("received_share", "Received", "share"),
    Column("service_tokens", "Weighed tokens", "count"),
    Column("num_requests", "Requests", "count"),
    Column("mean_queue_ms", "Mean queue", "ms"),
    Column("longest_queue_ms", "Longest queue", "ms"),
    Column("running", "Running now", "count"),
    Column("waiting", "Waiting now", "count"),
    Column("oldest_wait_ms", "Oldest wait now", "ms"),
    choices.TENANT_ID,
)
_REFUSALS = (
    Column(
        "tenant", "Tenant", link=lambda row: f"{pages.ROOT}/requests?project_id={row['project_id']}&outcome=refused"
    ),
    Column("code", "Reason", "code"),
    Column("num_requests", "Refused requests", "count"),
    choices.TENANT_ID,
)

ROUTES = [pages.get("/fairness", show_fairness)]
