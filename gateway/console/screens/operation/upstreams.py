"""One upstream: what its provider bills by the day, compared with what was bought of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from aiohttp import web

from gateway.console import pages
from gateway.console.formats import money
from gateway.console.tables import Column, Table
from gateway.console.viewer import Viewer

PATH = "/admin/v1/upstreams"


async def show_upstream(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    path = f"{PATH}/{pages.part(request, 'id')}"
    found, costs = await viewer.get(path), await viewer.get(f"{path}/costs")
    currency = costs["currency"]
    return pages.show(
        request,
        viewer,
        "upstream.html",
        found=found,
        costs=costs,
        table=Table("upstream-days", _DAYS, [_day(one, currency, found["id"]) for one in costs["days"]], _EMPTY),
    )


async def show_day(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    """Shows every line of a day, with the provider's corrections."""
    upstream, date = pages.part(request, "id"), request.match_info["date"]
    found = await viewer.get(f"{PATH}/{upstream}/costs", date=date)
    rows = [{**one, "in_force": "yes" if one["is_in_force"] else "corrected"} for one in found["lines"]]
    table = Table("upstream-lines", _LINES, rows, "The provider bills nothing for this day.")
    return pages.show(request, viewer, "upstream_day.html", found=found, table=table)


async def pull(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    upstream = pages.part(request, "id")
    found = await viewer.post(f"{PATH}/{upstream}/costs/pull", {})
    return pages.see_other(f"/upstreams/{upstream}", read=found["fault"] or "ok")


_EMPTY = "No day has been read, and nothing was bought on those that were."
_DAYS = (
    Column("date", "Day (UTC)", link=lambda row: f"{pages.ROOT}/upstreams/{quote(row['id'], safe='')}/{row['date']}"),
    Column("billed_micro_units", "Billed", "money", currency="currency"),
    Column("expected_micro_units", "Expected", "money", currency="currency"),
    Column("matched_micro_units", "Matched", "money", currency="currency"),
    Column("drift_micro_units", "Drift", "money", currency="currency"),
    Column("account", "Account"),
    Column("credit_micro_units", "Credits", "money", currency="currency"),
    Column("others", "Other currencies"),
    Column("num_calls", "Calls", "count"),
    Column("num_unsure", "Unsure", "count"),
    Column("num_corrections", "Corrections", "count"),
)
_LINES = (
    Column("line_item", "Line item"),
    Column("amount_micro_units", "Amount", "money", currency="currency"),
    Column("revision", "Statement", "count"),
    Column("in_force", "In force"),
    Column("pulled_at", "Read", "moment"),
)


def _day(one: Mapping[str, Any], currency: str, upstream: str) -> dict[str, Any]:
    others = ", ".join(money(amount, name) for name, amount in sorted(one["other_currencies_micro_units"].items()))
    return {**one, "id": upstream, "currency": currency, "others": others}


ROUTES = [
    pages.get("/upstreams/{id}", show_upstream),
    pages.get("/upstreams/{id}/{date}", show_day),
    pages.post("/upstreams/{id}/pull", pull),
]
