"""Home: what was spent, how much of it the cache saved, what failed, and what would stop requests first."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web
from yarl import URL

from accounting.values import periods
from gateway.console import charts, choices, formats, pages, spans
from gateway.console.calls import Refused
from gateway.console.tables import Column, Table, money_column
from gateway.console.viewer import Viewer

NUM_LIMITS = 10
DAY_S = 86_400
LIMITER_S = 0.15
"""The longest that the page waits for the limiter. It is asked for 2 s before a request is refused, and a page with the
money alone is better than a late one.
"""


async def show_home(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    try:
        found = await viewer.get(viewer.own("usage/summary"))
    except Refused as refused:
        if refused.status != 403:
            raise
        return pages.show(request, viewer, "home.html", found=None)
    windows = [] if viewer.sees_all else await _windows(viewer)
    caps = {one["currency"]: _month_cap(found, one["currency"], viewer.sees_all) for one in found["spending"]}
    now = time.time()
    limits = _limits(found, windows)
    tables = {"limits": limits, "failures": _failures(found["failures"])}
    if viewer.sees_all:
        tables["top-tenants"] = _spenders(found)
    first = next(iter(limits.rows), None)
    return pages.show(
        request,
        viewer,
        "home.html",
        found=found,
        month_caps=caps,
        months={one["currency"]: _month_chart(found, one, caps[one["currency"]], now) for one in found["spending"]},
        charts={one["currency"]: _spending_chart(one) for one in found["spending"]},
        first=first,
        names=await choices.names_of(viewer, [first["tenant"]] if first else []),
        tables=tables,
    )


async def _windows(viewer: Viewer) -> Sequence[Mapping[str, Any]]:
    """Returns the limits of the signed-in key that are no budget; none while the limiter does not answer at once."""
    try:
        async with asyncio.timeout(LIMITER_S):
            found = await viewer.get("/v1/me/limits")
    except TimeoutError:
        return []
    except Refused as refused:
        if refused.status != 503:
            raise
        return []
    return [one for one in found["data"] if one["enforced"] and "budget" not in one]


def _month_cap(found: Mapping[str, Any], currency: str, sees_all: bool) -> Mapping[str, Any] | None:
    """Returns the lowest cap of the whole month that binds all requests of the tenant, or of all tenants."""
    start, _ = periods.bounds(found["period"])
    caps = [
        cap
        for cap in found["caps"]
        if cap["start"] == start
        and cap["currency"] == currency
        and (cap["project_id"] is None) == sees_all
        and not any((cap["api_key_id"], cap["model"], cap["tier"]))
    ]
    return min(caps, key=lambda cap: int(cap["limit_micro_units"]), default=None)


def _limits(found: Mapping[str, Any], windows: Sequence[Mapping[str, Any]]) -> Table:
    """Returns the limits in the order in which they stop requests. A window has no pace: it counts a minute or a day that
    moves on, and is either reached now or not at all."""
    caps = [
        {
            "name": _name_of(cap),
            "subject": cap["api_key_id"] or cap["project_id"],
            "tenant": cap["project_id"],
            "used": formats.money(cap["used_micro_units"], cap["currency"]),
            "limit": formats.money(cap["limit_micro_units"], cap["currency"]),
            "used_share": _share(cap["used_micro_units"], cap["limit_micro_units"]),
            "reached_at": cap["reached_at"],
            "renewed_at": cap["end"],
            "lasts_until": cap["end"],
        }
        for cap in found["caps"]
    ]
    others = [
        {
            "name": _window_name(one),
            "subject": None,
            "tenant": None,
            "used": formats.count(one["used"] + one["reserved"]),
            "limit": formats.count(one["limit"]),
            "used_share": _share(one["used"] + one["reserved"], one["limit"]),
            "reached_at": found["as_of"] if one["used"] + one["reserved"] >= one["limit"] else None,
            "renewed_at": one["resets_at"],
            "lasts_until": None,
        }
        for one in windows
    ]
    rows = sorted([*caps, *others], key=_nearness)[:NUM_LIMITS]
    empty = "Nothing limits spending. Set a budget, so that a mistake cannot cost more than you want."
    return Table("limits", _LIMIT_COLUMNS, rows, empty)


def _nearness(row: Mapping[str, Any]) -> tuple[float, float]:
    """Returns what rows of limits are sorted by. Of those that are reached the first in the list stays the first."""
    return (math.inf if row["reached_at"] is None else row["reached_at"]), -min(1.0, row["used_share"])


_LIMIT_COLUMNS = (
    Column("name", "Limit"),
    Column("subject", "Of tenant or key", "code"),
    Column("used", "Used"),
    Column("limit", "Of"),
    Column("used_share", "Share", "share"),
    Column("reached_at", "Reached at this pace", "moment"),
    Column("renewed_at", "Free again", "moment"),
)


def _failures(found: Mapping[str, Any]) -> Table:
    """Returns the causes of failures, each with the way to its requests."""

    def link(cause: Mapping[str, Any]) -> str:
        asked = {"outcome": cause["outcome"], "status_class": f"{cause['status'] // 100}xx"}
        asked |= {"error_code": cause["error_code"]} if cause["error_code"] else {}
        return str(URL(pages.ROOT + "/requests").with_query(asked | {"from": spans.written(found["since"])}))

    columns = (
        Column("status", "Status", "state"),
        Column("cause", "Cause", link=link),
        Column("num_requests", "Requests", "count"),
    )
    rows = [{**cause, "cause": cause["error_code"] or cause["outcome"]} for cause in found["causes"]]
    return Table("failures", columns, rows, "No request failed.")


def _spenders(found: Mapping[str, Any]) -> Table:
    columns = (
        Column("project_name", "Tenant", link=lambda row: f"{pages.ROOT}/usage?project_id={row['project_id']}"),
        Column("project_id", "Id", "code"),
        Column("num_requests", "Requests", "count"),
        money_column("month_micro_units", "This month"),
    )
    return Table("top-tenants", columns, found["top_tenants"], "No tenant has used anything this month.")


def _spending_chart(one: Mapping[str, Any]) -> charts.Bars:
    amounts = [(_day(day["start_time"]), {"spent": max(0, day["amount_micro_units"])}) for day in one["days"]]
    labelled = [(f"{day}: {formats.money(parts['spent'], one['currency'])}", parts) for day, parts in amounts]
    return charts.stacked(labelled, ("spent",), formats.short_money, [day[5:] for day, _ in amounts])


def _month_chart(
    found: Mapping[str, Any], one: Mapping[str, Any], cap: Mapping[str, Any] | None, now: float
) -> charts.Month | None:
    """Returns what is spent of a month until each day. None before anything is spent in it."""
    start, end = periods.bounds(found["period"])
    by_day = {day["start_time"]: max(0, day["amount_micro_units"]) for day in one["days"] if day["start_time"] >= start}
    # The API tells the last 28 days. What is older stands in the month's sum alone, and is drawn with its first day.
    total = max(0, one["month_micro_units"]) - sum(by_day.values())
    sums = []
    for day in range(start, int(now) + 1, DAY_S):
        total += by_day.get(day, 0)
        sums.append(total)
    if not sums or not total:
        return None
    until = min((now - start) / DAY_S, (end - start) / DAY_S)
    limit = None if cap is None else int(cap["limit_micro_units"])
    return charts.month(sums, (end - start) // DAY_S, until, one["forecast"], limit)


def _day(second: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(second))


def _name_of(cap: Mapping[str, Any]) -> str:
    """Returns what a cap is called: its period and what it is for."""
    if cap["project_id"] is None:
        return "Spend limit of all tenants by month"
    period = "for a fixed time" if cap["period"] == "fixed" else f"by {cap['period']}"
    scope = ["one key" if cap["api_key_id"] else "the tenant", *(cap[name] for name in ("model", "tier") if cap[name])]
    return f"Budget {period} of {', '.join(scope)}"


def _window_name(one: Mapping[str, Any]) -> str:
    words = [one["dimension"].replace("_", " "), "of this key" if one["level"] == "key" else f"of the {one['level']}"]
    return " ".join([*words, *([one["model"]] if one["model"] else [])]).capitalize()


def _share(used: int, limit: int) -> float:
    return used / limit if limit > 0 else 1.0


ROUTES = [pages.get("", show_home)]
