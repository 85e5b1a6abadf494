"""Prices: sheets with their versions, what changed between two, an editor of the next version, and who pays by which."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from aiohttp import web

from gateway.console import choices, pages, rate_lines, spans
from gateway.console.calls import Refused
from gateway.console.tables import Column, Table, money_column, next_page
from gateway.console.viewer import Viewer

PATH = "/admin/v1/price-sheets"
PAGE_ROWS = 100
MAX_VERSION = 999_999_999
KEPT_WORDS = {"cache": "kept KV, cache", "pinned": "kept KV, pinned"}
NEW = {"sheet": "", "currency": "USD", "start": "", "rates": "", "residency": ""}


async def assign(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    """Makes a tenant pay by a sheet from a moment on."""
    form = await pages.fields_of(request)
    tenant_id = form.get("tenant_id", "")
    try:
        start = spans.read(form["start"]) if form.get("start") else None
        wanted = {"sheet": form.get("sheet", ""), "from": start}
        await viewer.put(f"/admin/v1/tenants/{quote(tenant_id, safe='')}/price-sheet", wanted)
    except (ValueError, Refused) as refused:
        return await list_sheets(request, viewer, str(refused), form)
    return pages.see_other("/prices", tenant_id=tenant_id, done="assigned")


async def list_sheets(
    request: web.Request, viewer: Viewer, message: str = "", form: Mapping[str, str] | None = None
) -> web.StreamResponse:
    found = await viewer.listed(PATH, PAGE_ROWS)
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
    tables = [
        Table(
            "price-sheets",
            _VERSIONS,
            rows,
            "There is no price sheet. Create one, so that requests have a price.",
            next_page(found),
        ),
        Table(
            "assignments", _INTERVALS, intervals, "This tenant pays by the sheet standard: it has no sheet of its own."
        ),
    ]
    return pages.show(
        request,
        viewer,
        "prices.html",
        message=message,
        form=form or {},
        tenants=await choices.tenants(viewer),
        tenant_id=tenant_id,
        tables=tables,
        status=400 if message else 200,
    )


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
        if form.get("action") != "create" or form.get("is_sure") != "yes":
            unsure = "Confirm that the version cannot be changed once it is created."
            message = unsure if form.get("action") == "create" else ""
            return _editor(request, viewer, form, message, await _preview(viewer, wanted))
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
    return pages.show(
        request,
        viewer,
        "price_editor.html",
        form=form,
        message=message,
        preview=preview,
        status=400 if message else 200,
    )


async def _preview(viewer: Viewer, wanted: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns what a version that is not created yet would change: its rates against those of the newest version of its
    sheet, and the charges of the last days. Raises `Refused`.
    """
    found = await viewer.post(f"{PATH}/preview", wanted)
    older = await _newest(viewer, wanted["sheet"])
    was: Mapping[str, Any] = older or {"rates": [], "residency": []}
    changed = rate_lines.changes(was["rates"], wanted["rates"])
    kept = rate_lines.changes(was["residency"], wanted["residency"], rate_lines.KEPT)
    rows = [*changed, *({**one, "token_class": KEPT_WORDS[one["token_class"]]} for one in kept)]
    nobody = "Nobody used this sheet in the last 7 days, so the new rates would have changed nothing."
    return {
        **found,
        "older": older,
        "from": wanted["from"],
        "changes": Table("changes", _CHANGES, _with(rows, found), "No rate differs."),
        "effects": Table("preview", _EFFECTS, _with(found["data"], found), nobody),
    }


async def _newest(viewer: Viewer, sheet: str) -> Mapping[str, Any] | None:
    """Returns the newest version of a sheet. None if there is no such sheet."""
    # The list has the newest version of each sheet first, so that it stands behind a number that none has.
    found = (await viewer.get(PATH, limit=1, after=f"{sheet}@{MAX_VERSION}"))["data"]
    return found[0] if found and found[0]["sheet"] == sheet else None


def _version(sheet: str, number: str) -> str:
    return f"{PATH}/{quote(sheet, safe='')}/{quote(number, safe='')}"


def _state(start: int, until: int | None, now: float) -> str:
    if start > now:
        return "begins later"
    return "in force" if until is None or until > now else "over"


def _with(rows: Any, owner: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{**row, "currency": owner["currency"]} for row in rows]


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
    money_column("cache_read", "Prompt, cached"),
    money_column("cache_write", "Prompt, written"),
    money_column("uncached", "Prompt, uncached"),
    money_column("output", "Output"),
)
_CHANGES = (
    Column("model", "Model"),
    Column("tier", "Tier"),
    Column("token_class", "Class"),
    money_column("before", "Before"),
    money_column("after", "After"),
    Column("change", "Change", "share"),
)
_KEPT = (
    Column("model", "Model"),
    money_column("cache", "Cache, per GB and hour"),
    money_column("pinned", "Pinned, per GB and hour"),
)
_EFFECTS = (
    Column("model", "Model"),
    Column("tier", "Tier"),
    Column("num_requests", "Requests", "count"),
    Column("quantity", "Tokens", "count"),
    money_column("charged_micro_units", "Was charged"),
    money_column("priced_micro_units", "By the new rates"),
    money_column("difference_micro_units", "Difference"),
)

ROUTES = [
    pages.get("/prices", list_sheets),
    pages.post("/prices/assign", assign),
    pages.get("/prices/edit", edit, changes=True),
    pages.post("/prices/edit", create),
    pages.get("/prices/{sheet}/{version}", show_version),
]
