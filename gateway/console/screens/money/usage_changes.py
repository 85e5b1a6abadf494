"""Why the bill changed: the difference of two periods, split into causes that add up to it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from accounting.comparison.causes import MEANINGS
from accounting.values.periods import month_start
from gateway.base import errors
from gateway.console import formats, pages, spans
from gateway.console.tables import Column, Table, money_column, sums_of
from gateway.console.viewer import Viewer

TIMES = ("before_start", "before_end", "start", "end")
FILTERS = ("api_key_id", "model")
COMPARED = ("before", "after", "difference")


async def show_changes(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    asked = request.query
    try:
        times = _times({name: asked.get(name, "") for name in TIMES}, int(time.time()))
    except ValueError as error:
        raise errors.invalid(str(error), "start") from None
    tenant_id = asked.get("project_id", "") if viewer.sees_all else viewer.principal.tenant_id
    found = None
    if tenant_id:
        found = await viewer.get(
            viewer.own("usage/changes"),
            project_id=tenant_id,
            before_start_time=times["before_start"],
            before_end_time=times["before_end"],
            start_time=times["start"],
            end_time=times["end"],
            **{name: asked.get(name) for name in FILTERS},
        )
    tables = [] if found is None else [_causes(found), _models(found), _keys(found)]
    return pages.show(
        request,
        viewer,
        "usage_changes.html",
        found=found,
        sentence=None if found is None else _sentence(found),
        bars=None if found is None else _bars(found),
        times={name: spans.written(second) for name, second in times.items()},
        filters=FILTERS,
        tenant_id=tenant_id,
        tables=tables,
    )


def _times(given: Mapping[str, str], now: int) -> dict[str, int]:
    """Returns the four moments: what was given, and else this month so far and the same span of the month before.
    Raises ValueError."""
    until = now - now % 60
    start = spans.read(given["start"]) if given["start"] else month_start(until)
    end = spans.read(given["end"]) if given["end"] else max(until, start + 60)
    before = spans.read(given["before_start"]) if given["before_start"] else month_start(max(0, start - 1))
    usual_end = min(before + end - start, max(start, before + 60))
    before_end = spans.read(given["before_end"]) if given["before_end"] else usual_end
    return {"before_start": before, "before_end": before_end, "start": start, "end": end}


def _sentence(found: Mapping[str, Any]) -> str:
    """Names the difference and its first cause."""
    difference, currency = found["difference_micro_units"], found["currency"].upper()
    first = found["first_cause"]
    if first is None:
        return "Nothing changed between the two periods."
    amount = formats.money(abs(difference), currency)
    moved = f"The bill is {amount} {'higher' if difference > 0 else 'lower'}" if difference else "The bill is the same"
    return f"{moved}. The first cause is {MEANINGS.get(first, first)}."


def _bars(found: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Returns a signed bar for each cause: place and width in per cent of the whole, with 0 in the middle."""
    parts = [part for part in found["parts"] if part["amount_micro_units"]]
    most = max((abs(part["amount_micro_units"]) for part in parts), default=1)
    return [
        {
            "name": MEANINGS.get(part["cause"], part["cause"]),
            "amount": part["amount_micro_units"],
            "x": round(50 - max(0.0, -50 * part["amount_micro_units"] / most), 3),
            "width": round(50 * abs(part["amount_micro_units"]) / most, 3),
        }
        for part in parts
    ]


def _causes(found: Mapping[str, Any]) -> Table:
    rows = [
        {**part, "meaning": MEANINGS.get(part["cause"], part["cause"]), "currency": found["currency"].upper()}
        for part in found["parts"]
        if part["amount_micro_units"]
    ]
    columns = (
        Column("cause", "Cause"),
        Column("meaning", "What changed"),
        money_column("amount_micro_units", "Part of the difference"),
    )
    return Table("causes", columns, rows, "Nothing changed between the two periods.")


def _models(found: Mapping[str, Any]) -> Table:
    first = Column("first_cause", "First cause")
    rows = [
        {**one, "first_cause": MEANINGS.get(one["parts"][0]["cause"], "") if one["parts"] else ""}
        for one in found["models"]
    ]
    return _compared("models", "model", "Model", rows, found, first)


def _keys(found: Mapping[str, Any]) -> Table:
    return _compared("api-keys", "api_key_id", "Key", found["api_keys"], found)


def _compared(
    name: str, field: str, label: str, rows: Sequence[Mapping[str, Any]], found: Mapping[str, Any], *more: Column
) -> Table:
    columns = (
        Column(field, label, "code" if field == "api_key_id" else "text"),
        *(Column(f"{one}_micro_units", one.capitalize(), "money", currency="currency") for one in COMPARED),
        *more,
    )
    currency = found["currency"].upper()
    shown = [{**row, "currency": currency} for row in rows]
    sums = sums_of(shown, [f"{one}_micro_units" for one in COMPARED])
    return Table(name, columns, shown, "Nothing was used in either period.", sums=sums)


ROUTES = [pages.get("/usage/changes", show_changes)]
