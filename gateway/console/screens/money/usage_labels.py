"""Use by label: what each end user, or each value of a field of the metadata, used and cost."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aiohttp import web
from yarl import URL

from gateway.base import errors
from gateway.console import charts, choices, formats, pages, spans
from gateway.console.spans import Span
from gateway.console.tables import Column, Table, money_column, sums_of
from gateway.console.viewer import Viewer

MOST = 1000
"""The values that the page shows."""
BEYOND = "(other values)"
_EMPTY = (
    "No charged request of these days has this label. A request names its end user in 'user', and its own labels in "
    "'metadata'."
)


async def show_labels(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    asked = request.query
    try:
        span = spans.span_of("day", asked.get("start", ""), asked.get("end", ""), int(time.time()))
    except ValueError as error:
        raise errors.invalid(str(error), "start") from None
    label = asked.get("label") or "end_user"
    filters = choices.asked(request, ("project_id", "model"))
    times = {"start_time": span.start, "end_time": span.end}
    found = await viewer.get(viewer.own("usage/labels"), label=label, limit=MOST, by_day="true", **times, **filters)
    rows = [_row(one) for one in found["data"]]
    into = _requests_of(viewer, span, filters) if label == "end_user" else None
    return pages.show(
        request,
        viewer,
        "usage_labels.html",
        span=span,
        label=label,
        labels=list(dict.fromkeys(["end_user", *found["labels"], label])),
        written=spans.written,
        bars=_bars(found, span),
        is_cut=len(rows) == MOST,
        currency=found["data"][0]["currency"] if found["data"] else "",
        table=Table("usage-by-label", choices.columns_for(viewer, _columns(into)), rows, _EMPTY, sums=_sums(rows)),
    )


def _bars(found: Mapping[str, Any], span: Span) -> charts.Bars | None:
    """Returns the cost by day of the largest values, in the currency of the largest. None where nothing was charged."""
    if not found["data"]:
        return None
    currency = found["data"][0]["currency"]
    days: dict[int, dict[str, float]] = {start: {} for start in span.starts}
    totals = Counter[str]()
    for one in found["days"]:
        if one["currency"] == currency and one["start_time"] in days:
            name, parts = one["value"] or BEYOND, days[one["start_time"]]
            # A client may name a value as the rest is named here.
            parts[name] = parts.get(name, 0) + one["charge_micro_units"]
            totals[name] += one["charge_micro_units"]
    names = sorted(totals, key=lambda name: (name == BEYOND, -totals[name]))
    labelled = [
        (f"{spans.label('day', start)}: {formats.money(int(sum(parts.values())), currency)}", parts)
        for start, parts in days.items()
    ]
    return charts.stacked(labelled, names, formats.short_money, [label[5:10] for label, _ in labelled])


def _sums(rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Returns the sums of what is shown; a list that was cut has more."""
    return sums_of(rows, ("requests", "prompt", "cached", "output", "cost")) if len(rows) < MOST else ()


def _row(one: Mapping[str, Any]) -> dict[str, Any]:
    usage = one["usage"]
    prompt = usage["prompt_tokens"]
    return {
        "value": one["value"] or BEYOND,
        "is_rest": one["value"] is None,
        "project_id": one["project_id"],
        "requests": one["num_requests"],
        "prompt": prompt,
        "cached": usage["cached_tokens"],
        "cached_share": usage["cached_tokens"] / prompt if prompt else None,
        "output": usage["completion_tokens"],
        "cost": one["charge_micro_units"],
        "currency": one["currency"],
    }


def _requests_of(viewer: Viewer, span: Span, filters: Mapping[str, str]) -> Callable[[Mapping[str, Any]], str | None]:
    """Returns the link from an end user to its requests. The log has no filter for fields of the metadata."""
    times = {"from": spans.written(span.start), "until": spans.written(span.end)}

    def link(row: Mapping[str, Any]) -> str | None:
        if row["is_rest"]:
            return None
        owner = {"project_id": row["project_id"]} if viewer.sees_all else {}
        return str(URL(pages.ROOT + "/requests").with_query({**filters, **owner, "end_user": row["value"], **times}))

    return link


def _columns(into: Callable[[Mapping[str, Any]], str | None] | None) -> Sequence[Column]:
    return (
        Column("value", "Value", link=into),
        Column("project_id", "Tenant", "code", names_tenant=True),
        Column("requests", "Requests", "count"),
        Column("prompt", "Prompt tokens", "count"),
        Column("cached", "Cached tokens", "count"),
        Column("cached_share", "Cached share", "share"),
        Column("output", "Output tokens", "count"),
        money_column("cost", "Cost"),
    )


ROUTES = [pages.get("/usage/labels", show_labels)]
