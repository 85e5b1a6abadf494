"""Prices: sheets with their versions, what changed between two, an editor of the next version, and who pays by which."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from aiohttp import web

from gateway.console import choices, pages, rate_lines, spans
from gateway.console.calls import Refused
from gateway.console.tables import Column, Table, chosen
from gateway.console.viewer import Viewer

PATH = "/admin/v1/price-sheets"
PAGE_ROWS = 100
NEW = {"sheet": "", "currency": "USD", "start": "", "rates": "", "residency": ""}


async def list_sheets(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    return await _list(request, viewer)


async def assign(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    """Makes a tenant pay by a sheet from a moment on."""
    form = await pages.fields_of(request)
    tenant_id = form.get("tenant_id", "")
    try:
        start = spans.read(form["start"]) if form.get("start") else None
        wanted = {"sheet": form.get("sheet", ""), "from": start}
        await viewer.put(f"/admin/v1/tenants/{quote(tenant_id, safe='')}/price-sheet", wanted)
    except (ValueError, Refused) as refused:
        return await _list(request, viewer, str(refused), form)
    return pages.see_other("/prices", tenant_id=tenant_id, done="assigned")


async def _list(
    request: web.Request, viewer: Viewer, message: str = "", form: Mapping[str, str] | None = None
) -> web.StreamResponse:
    after = {} if message else {"after": request.query.get("after")}
    found = await viewer.get(PATH, limit=PAGE_ROWS, **after)
    tenant_id = request.query.get("tenant_id", "")
    intervals = []
    if tenant_id and not message:
        path = f"/admin/v1/tenants/{quote(tenant_id, safe='')}/price-sheet"
        intervals = (await viewer.get(path))["intervals"]
    now = time.time()
    rows = [
        {**one, "num_models": len(one["rates"]), "state": _state(one["from"], one["until"], now)}
        for one in found["data"]
    ]
    following = {"after": found["last_id"]} if found["has_more"] else {}
    tables = [
        Table(
            "price-sheets",
            _VERSIONS,
            rows,
            "There is no price sheet. Create one, so that requests have a price.",
            following,
        ),
        Table(
            "assignments", _INTERVALS, intervals, "This tenant pays by the sheet standard: it has no sheet of its own."
        ),
    ]
    page = pages.show(
        request,
        viewer,
        "prices.html",
        message=message,
        form=form or {},
        tenants=await choices.tenants(viewer),
        tenant_id=tenant_id,
        tables=tables,
        table=chosen(tables, request.query.get("table")),
    )
    if message:
        page.set_status(400)
    return page


async def show_version(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    """Shows one version, and what changed since the one before or since `?against=`."""
    sheet, number = request.match_info["sheet"], request.match_info["version"]
    found = await viewer.get(_version(sheet, number))
    against = request.query.get("against") or (str(found["version"] - 1) if found["version"] > 1 else "")
    older = await viewer.get(_version(sheet, against)) if against else None
    changed = [] if older is None else rate_lines.changes(older["rates"], found["rates"])
    tables = [
        Table(f"rates-{found['sheet']}-{found['version']}", _RATES, _with(found["rates"], found), "It has no rates."),
        Table("changes", _CHANGES, _with(changed, found), "No rate differs."),
        Table("kept-kv", _KEPT, _with(found["residency"], found), "Kept KV is not charged."),
    ]
    return pages.show(
        request,
        viewer,
        "price_sheet.html",
        found=found,
        older=older,
        state=_state(found["from"], found["until"], time.time()),
        tables=tables,
        table=chosen(tables, request.query.get("table")),
    )


async def edit(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    """Shows the editor: empty, or with the rates of `?like=<sheet>@<n>`."""
    sheet, _, number = request.query.get("like", "").rpartition("@")
    form = NEW
    if sheet:
        found = await viewer.get(_version(sheet, number))
        form = NEW | {
            "sheet": found["sheet"],
            "currency": found["currency"],
            "rates": rate_lines.rates_text(found["rates"]),
            "residency": rate_lines.residency_text(found["residency"]),
        }
    return _editor(request, viewer, form)


async def create(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    """Previews the version of the form, or creates it."""
    form = NEW | dict(await pages.fields_of(request))
    try:
        wanted = {
            "sheet": form["sheet"],
            "currency": form["currency"] or None,
            "from": spans.read(form["start"]) if form["start"] else None,
            "rates": rate_lines.read_rates(form["rates"]),
            "residency": rate_lines.read_residency(form["residency"]),
        }
        if form.get("action") != "create":
            return _editor(request, viewer, form, preview=await viewer.post(f"{PATH}/preview", wanted))
        if form.get("is_sure") != "yes":
            return _editor(request, viewer, form, "Confirm that the version cannot be changed once it is created.")
        made = await viewer.post(PATH, wanted)
    except (ValueError, Refused) as refused:
        return _editor(request, viewer, form, str(refused))
    unpriced = ", ".join(f"{one['model']} ({one['tier']})" for one in made["unpriced"])
    return pages.see_other(f"/prices/{quote(made['sheet'], safe='')}/{made['version']}", unpriced=unpriced)


def _editor(
    request: web.Request,
    viewer: Viewer,
    form: Mapping[str, str],
    message: str = "",
    preview: Mapping[str, Any] | None = None,
) -> web.StreamResponse:
    table = None if preview is None else _preview_table(preview)
    page = pages.show(
        request, viewer, "price_editor.html", form=form, message=message, preview=preview, preview_table=table
    )
    if message:
        page.set_status(400)
    return page


def _preview_table(preview: Mapping[str, Any]) -> Table:
    empty = "Nobody used this sheet in the last 7 days, so the new rates would have changed nothing."
    return Table("preview", _EFFECTS, _with(preview["data"], preview), empty)


def _version(sheet: str, number: str) -> str:
    return f"{PATH}/{quote(sheet, safe='')}/{quote(number, safe='')}"


def _state(start: int, until: int | None, now: float) -> str:
    if start > now:
        return "begins later"
    return "in force" if until is None or until > now else "over"


def _with(rows: Any, owner: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{**row, "currency": owner["currency"]} for row in rows]


def _money(name: str, label: str) -> Column:
    return Column(name, label, "money", currency="currency")


_VERSIONS = (
    Column("id", "Version", link=lambda row: f"{pages.ROOT}/prices/{quote(row['sheet'], safe='')}/{row['version']}"),
    Column("state", "State", "state"),
    Column("currency", "Currency"),
    Column("from", "From", "moment"),
    Column("until", "Until", "moment"),
    Column("num_models", "Rates", "count"),
    Column("created_at", "Created", "moment"),
)
_INTERVALS = (Column("sheet", "Sheet"), Column("from", "From", "moment"), Column("until", "Until", "moment"))
_RATES = (
    Column("model", "Model"),
    Column("tier", "Tier"),
    _money("cache_read", "Prompt, cached"),
    _money("cache_write", "Prompt, written"),
    _money("uncached", "Prompt, uncached"),
    _money("output", "Output"),
)
_CHANGES = (
    Column("model", "Model"),
    Column("tier", "Tier"),
    Column("token_class", "Class"),
    _money("before", "Before"),
    _money("after", "After"),
    Column("change", "Change", "share"),
)
_KEPT = (
    Column("model", "Model"),
    _money("cache", "Cache, per GB and hour"),
    _money("pinned", "Pinned, per GB and hour"),
)
_EFFECTS = (
    Column("model", "Model"),
    Column("tier", "Tier"),
    Column("num_requests", "Requests", "count"),
    Column("quantity", "Tokens", "count"),
    _money("charged_micro_units", "Was charged"),
    _money("priced_micro_units", "By the new rates"),
    _money("difference_micro_units", "Difference"),
)

ROUTES = [
    pages.get("/prices", list_sheets),
    pages.post("/prices/assign", assign),
    pages.get("/prices/edit", edit),
    pages.post("/prices/edit", create),
    pages.get("/prices/{sheet}/{version}", show_version),
]
