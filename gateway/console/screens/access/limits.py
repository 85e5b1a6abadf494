"""A tenant's own limits: everything that binds the key that signed in, with what counts against it now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from gateway.console import pages
from gateway.console.formats import count, money
from gateway.console.tables import Column, Table
from gateway.console.viewer import Viewer

LIMITS: dict[str, str] = {
    "max_requests_per_1_minute": "Requests a minute",
    "max_tokens_per_1_minute": "Tokens a minute",
    "max_running_requests": "Requests at one time",
}
"""Limits that an operator or a tenant sets, of a tenant or of a key."""
MONEY = "budget_micro_units"
WORDS = {
    "requests_per_minute": "requests a minute",
    "tokens_per_minute": "tokens a minute",
    "input_tokens_per_minute": "input tokens a minute",
    "output_tokens_per_minute": "output tokens a minute",
    "requests_per_day": "requests a day",
    "batch_tokens_per_day": "tokens of batches a day",
    "concurrency": "requests at one time",
    MONEY: "budget",
}


async def show_limits(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    found = await viewer.get("/v1/me/limits")
    return pages.show(request, viewer, "limits.html", table=limits_table(found["data"]), as_of=found["as_of"])


def limits_table(found: Sequence[Mapping[str, Any]]) -> Table:
    """Returns the limits in force."""
    rows = [_row(one) for one in found]
    return Table("limits", _COLUMNS, sorted(rows, key=lambda row: -(row["share"] or 0)), "No limit is in force.")


def _row(one: Mapping[str, Any]) -> dict[str, Any]:
    def amount(value: int) -> str:
        return money(value, one["currency"]) if one["dimension"] == MONEY else count(value)

    taken = one["used"] + one["reserved"]
    return {
        "level": one["level"].replace("_", " "),
        "what": WORDS.get(one["dimension"], one["dimension"]),
        "model": one["model"],
        "tier": one["tier"] or "all",
        "share": taken / one["limit"] if one["limit"] else None,
        "limit": amount(one["limit"]),
        "used": amount(one["used"]),
        "held": amount(one["reserved"]),
        "left": amount(max(0, one["limit"] - taken)),
        "resets_at": one["resets_at"],
        "enforced": _effect(one),
        "would_have_refused": one["would_have_refused"],
    }


def _effect(one: Mapping[str, Any]) -> str:
    if one["enforced"]:
        return "refuses"
    return "tells only" if one["would_have_refused"] is None else "watches only"


_COLUMNS: Sequence[Column] = (
    Column("level", "Counted for"),
    Column("what", "What"),
    Column("model", "Model"),
    Column("tier", "Tier"),
    Column("share", "Taken", "share"),
    Column("limit", "Limit"),
    Column("used", "Used"),
    Column("held", "Held"),
    Column("left", "Left"),
    Column("resets_at", "Empty or new at", "moment"),
    Column("enforced", "Effect"),
    Column("would_have_refused", "Would have refused in 7 days", "count"),
)

ROUTES = [pages.get("/limits", show_limits)]
