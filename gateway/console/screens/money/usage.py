"""Usage and cost over time: bars of days, hours or minutes, and tables by group and by time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from aiohttp import web
from yarl import URL

from gateway.base import errors
from gateway.console import charts, choices, formats, pages, spans
from gateway.console.spans import Span
from gateway.console.tables import Column, Kind, Table, money_column
from gateway.console.usage_sums import GROUPS, Group, Item, Measure
from gateway.console.usage_sums import Table as SumsTable
from gateway.console.viewer import Viewer

MEASURES: Sequence[Measure] = ("cost", "tokens", "requests")
FILTERS = ("project_id", "api_key_id", "model", "tier")
REQUEST_FILTERS = {"tier": "service_tier"}
"""The filters that the list of requests has by another name."""
COST_DIMENSIONS: Mapping[str, str] = {"tenant": "project_id", "key": "api_key_id"}
MAX_PAGES = 4
"""The pages of the API, of up to 10,000 results each, that a page sums up."""
RESULT_CELLS = 10
"""The number of cells that take as long as the sums of one result."""
_Buckets = Sequence[Mapping[str, Any]]
EMPTY = "Nothing was used in this time. Send a request with an API key, or choose another time."


async def show_usage(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    asked = request.query
    try:
        span = spans.span_of(asked.get("width", ""), asked.get("start", ""), asked.get("end", ""), int(time.time()))
    except ValueError as error:
        raise errors.invalid(str(error), "start") from None
    group: Group = asked.get("group", "")  # type: ignore[assignment]  # it is looked up below
    measure: Measure = asked.get("measure", "cost")  # type: ignore[assignment]  # the same
    groups = [name for name in GROUPS if viewer.sees_all or name != "tenant"]
    if group not in groups or measure not in MEASURES:
        raise errors.invalid("This grouping is not known.", "group")
    sums, num_cells = await _sums(viewer, span, group, choices.asked(request, FILTERS))
    names = await choices.names_of(viewer, {name for _, name in sums.cells}) if group == "tenant" else {}
    values = await pages.in_turn(request, num_cells, lambda: _values(request, span, group, measure, sums, names))
    return pages.show(
        request,
        viewer,
        "usage.html",
        span=span,
        group=group,
        measure=measure,
        groups=groups,
        measures=MEASURES,
        filters=[name for name in FILTERS if viewer.sees_all or name != "project_id"],
        written=spans.written,
        **values,
    )


def _values(
    request: web.Request, span: Span, group: Group, measure: Measure, sums: SumsTable, names: Mapping[str, str]
) -> dict[str, Any]:
    """Returns what the page shows of the sums."""
    currency, here = _currency(sums, request.query.get("currency", "")), request.rel_url
    total = sums.total
    return {
        "currency": currency,
        "currencies": sums.currencies,
        "bars": _bars(sums, span, measure, currency, names),
        "targets": [_into(here, span, start) for start in span.starts],
        "totals": total.counts,
        "costs": [(each, total.amount(each)) for each in sums.currencies or [currency]],
        "tables": [_by_group(sums, group, names, here), _by_time(sums, span, here)],
    }


async def _sums(viewer: Viewer, span: Span, group: Group, filters: Mapping[str, str]) -> tuple[SumsTable, int]:
    """Returns the sums of the span by time and group from two reports of the API, and the number of cells that take as
    long as they. Raises `ApiError` 400 for too many.
    """
    width, most = spans.API_WIDTHS[span.width], spans.MOST[span.width]
    common: dict[str, Any] = {"start_time": span.start, "end_time": span.end, "bucket_width": width, "limit": most}
    common |= {f"{name}s": filters[name] for name in ("project_id", "api_key_id") if name in filters}
    tier, model = filters.get("tier"), filters.get("model")
    batch = {"batch": "true", "default": "false"}.get(tier or "")
    dimension = GROUPS[group]
    groups = ["currency"] if dimension is None else [dimension, "currency"]
    sums, turn = SumsTable(group), asyncio.Lock()

    def is_asked(item: Item) -> bool:
        return model in {None, item.model} and tier in {None, item.tier}

    used = {"group_by": groups, "models": model, "batch": batch}
    cost = {"group_by": _cost_groups(group, filters)}
    cells = await asyncio.gather(
        _each_page(viewer, "/v1/organization/usage/completions", common | used, sums.add_usage, turn),
        _each_page(viewer, "/v1/organization/costs", common | cost, partial(sums.add_costs, is_asked=is_asked), turn),
    )
    return sums, sum(cells)


async def _each_page(
    viewer: Viewer, path: str, query: Mapping[str, Any], add: Callable[[_Buckets], None], turn: asyncio.Lock
) -> int:
    """Adds up the pages of a report, one at a time, and returns the number of cells that take as long. Raises `ApiError`
    400 if there are more than `MAX_PAGES`.
    """
    num_cells, page = 0, None
    for _ in range(MAX_PAGES):
        found = await viewer.get(path, page=page, **query)
        page_cells = RESULT_CELLS * sum(len(bucket["results"]) for bucket in found["data"])
        async with turn:
            await pages.in_turn(viewer.request, page_cells, partial(add, found["data"]))
        num_cells, page = num_cells + page_cells, found["next_page"]
        if page is None:
            return num_cells
    raise errors.invalid(
        "These are too many sums for one page. Choose a shorter time, wider bars, another group or a filter.", "start"
    )


def _cost_groups(group: Group, filters: Mapping[str, str]) -> Sequence[str]:
    """Returns what costs are asked by. Line items are many, so they are asked for only where they are needed."""
    own = [COST_DIMENSIONS[group]] if group in COST_DIMENSIONS else []
    return own if own and not {"model", "tier"} & set(filters) else [*own, "line_item"]


def _currency(sums: SumsTable, asked: str) -> str:
    known = sums.currencies
    return asked if asked in known else next(iter(known), "USD")


def _bars(sums: SumsTable, span: Span, measure: Measure, currency: str, names: Mapping[str, str]) -> charts.Bars:
    starts = span.starts
    parts, bars = sums.parts(starts, measure, currency)
    labels = [
        f"{spans.label(span.width, start)}: {_measured(sum(bar.values()), measure, currency)}"
        for start, bar in zip(starts, bars, strict=True)
    ]
    drawn = charts.stacked(
        list(zip(labels, bars, strict=True)),
        parts,
        formats.short_money if measure == "cost" else formats.short_count,
        [_below(span, start) for start in starts],
    )
    return replace(drawn, names=[names.get(name, name) or "all" for name in parts])


def _below(span: Span, start: int) -> str:
    """Returns what stands below a bar: its day, or its time of the day."""
    label = spans.label(span.width, start)
    return label[5:] if span.width == "day" else label[-5:]


def _measured(value: float, measure: Measure, currency: str) -> str:
    if measure == "cost":
        return formats.money(int(value), currency)
    return f"{int(value):,} {measure}"


def _into(here: URL, span: Span, start: int) -> str:
    """Returns the address of one bar: the page of its finer bars, or the requests of its minute."""
    seconds = spans.SECONDS[span.width]
    if span.width == "minute":
        kept = {REQUEST_FILTERS.get(name, name): here.query[name] for name in FILTERS if here.query.get(name)}
        times = {"from": spans.written(start), "until": spans.written(start + seconds)}
        return str(URL(pages.ROOT + "/requests").with_query(kept | times))
    finer = {"width": spans.FINER[span.width], "start": spans.written(start), "end": spans.written(start + seconds)}
    return str(here.without_query_params("format", "table").update_query(finer))


def _by_group(sums: SumsTable, group: Group, names: Mapping[str, str], here: URL) -> Table:
    rows = []
    for name, total in sums.by("group").items():
        rows += [{"group": name, "name": names.get(name, ""), **row} for row in total.rows]
    rows.sort(key=lambda row: (-(row["cost"] or 0), -row["output"], row["group"]))
    kind: Kind = "code" if group in {"tenant", "key"} else "text"
    by = {"tenant": "project_id", "key": "api_key_id", "model": "model", "tier": "tier"}.get(group)
    own = [] if by is None else [Column("group", group.capitalize(), kind, link=_only(here, by))]
    named = [Column("name", "Name")] if group == "tenant" else []
    return Table("usage-by-group", [*own, *named, *_COLUMNS], rows, EMPTY, sums=sums.total.rows if own else ())


def _only(here: URL, name: str) -> Any:
    """Returns the link of a row: the same page with this group alone."""
    plain = here.without_query_params("format", "table", "group")
    return lambda row: str(plain.update_query({name: row["group"]})) if row["group"] else None


def _by_time(sums: SumsTable, span: Span, here: URL) -> Table:
    totals = sums.by("time")
    rows = [
        {"start": start, "time": spans.label(span.width, start), **row}
        for start in sorted(totals)
        for row in totals[start].rows
    ]
    # Days are UTC's, so their names must not move with the viewer's zone.
    into = Column("time", f"{span.width.capitalize()} (UTC)", link=lambda row: _into(here, span, row["start"]))
    return Table("usage-by-time", [into, *_COLUMNS], rows, EMPTY, sums=sums.total.rows)


_COLUMNS = (
    Column("requests", "Requests", "count"),
    Column("cached", "Prompt, cached", "count"),
    Column("written", "Prompt, written", "count"),
    Column("uncached", "Prompt, uncached", "count"),
    Column("output", "Output", "count"),
    money_column("cost", "Cost"),
)


ROUTES = [pages.get("/usage", show_usage)]
