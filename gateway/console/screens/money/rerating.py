"""A month by other prices: what each tenant would have paid by another version of a sheet. Nothing is written.

The page reads the month's sums. `headgate rerate` prices each request by itself and gives every class of tokens.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from aiohttp import web

from accounting.values import periods
from gateway.console import choices, pages
from gateway.console.calls import Refused
from gateway.console.tables import Column, Table, money_column, next_page
from gateway.console.viewer import Viewer

SHEETS = "/admin/v1/price-sheets"
PAGE_ROWS = 100
FIELDS = ("period", "sheet", "project_id", "change_percent")


async def show_month(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    form = {name: request.query.get(name, "").strip() for name in FIELDS}
    form["period"] = form["period"] or periods.period_of(int(time.time()))
    versions = [one["id"] for one in (await viewer.get(SHEETS, limit=PAGE_ROWS))["data"]]
    found, message = None, ""
    if form["sheet"]:
        try:
            found = await _read(viewer, form)
        except Refused as refused:
            message = f"There is no version {form['sheet']}." if refused.status == 404 else refused.message
    tables = [] if found is None else await _tables(viewer, found, form)
    return pages.show(
        request,
        viewer,
        "rerating.html",
        form=form,
        versions=versions,
        tenants=await choices.tenants(viewer),
        found=found,
        message=message,
        tables=tables,
        status=400 if message else 200,
    )


async def _read(viewer: Viewer, form: Mapping[str, str]) -> Mapping[str, Any]:
    sheet, _, number = form["sheet"].rpartition("@")
    if not sheet or not number:
        raise Refused(400, "Name one version of a sheet, such as standard@1.")
    path = f"{SHEETS}/{quote(sheet, safe='')}/{quote(number, safe='')}/month"
    asked = {name: form[name] for name in FIELDS if name != "sheet"}
    return await viewer.listed(path, PAGE_ROWS, **asked)


async def _tables(viewer: Viewer, found: Mapping[str, Any], form: Mapping[str, str]) -> Sequence[Table]:
    tenants = await choices.named(viewer, ({**row, "currency": found["currency"]} for row in found["data"]))
    models = [{**row, "currency": found["currency"]} for row in found["models"]]
    empty = "Nobody used anything in this month in the currency of this sheet."
    name = f"{form['period']}-by-{found['price_version'].replace('@', '-')}"
    return [
        Table(f"tenants-{name}", _TENANTS, tenants, empty, next_page(found)),
        Table(f"models-{name}", _MODELS, models, empty),
    ]


_AMOUNTS = (
    money_column("charged_micro_units", "Was charged"),
    money_column("priced_micro_units", "By these prices"),
    money_column("difference_micro_units", "Difference"),
)
_TENANTS = (
    choices.TENANT,
    Column("num_requests", "Requests", "count"),
    Column("num_unpriced", "Of these without a price", "count"),
    *_AMOUNTS,
    Column("currency", "Currency"),
    choices.TENANT_ID,
)
_MODELS = (
    Column("model", "Model"),
    Column("tier", "Tier"),
    Column("num_requests", "Requests", "count"),
    Column("quantity", "Tokens", "count"),
    *_AMOUNTS,
    Column("currency", "Currency"),
)

ROUTES = [pages.get("/prices/month", show_month)]
