"""Invoices and credits: the list, one invoice with its lines and files, the close of a month, a new credit, the FOCUS
export.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from aiohttp import web
from yarl import URL

from accounting.values import periods
from gateway.console import choices, pages, spans
from gateway.console.calls import Refused
from gateway.console.tables import Column, Table, money_column, next_page
from gateway.console.viewer import Viewer
from gateway.schema import money

FILTERS = ("project_id", "period")
FILES = {"pdf": "PDF", "xml": "XML (EN 16931)", "html": "HTML", "csv": "CSV"}
CREDIT_TYPES = {
    "grant": "Grant: prepaid money",
    "adjustment": "Adjustment of a request that is on no invoice yet",
    "credit_note": "Credit note for a request on an invoice",
}
SERVICE_TIERS = {"interactive": "default", "batch": "batch"}
"""The tiers of lines of usage, by their names in the list of requests."""
PAGE_ROWS = 100
AFTER_CREDIT = "after_credit"
"""The page's second list has a place of its own in the address."""


async def show_invoice(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    return await invoice_page(
        request, viewer, await viewer.get(viewer.own(f"invoices/{pages.part(request, 'number')}"))
    )


async def invoice_page(
    request: web.Request, viewer: Viewer, found: Mapping[str, Any], refused: Refused | None = None
) -> web.Response:
    """Shows an invoice, or the draft of one. A refusal of a payment or of a void stands above it."""
    return pages.show(
        request, viewer, "invoice.html", found=found, files=FILES, table=_lines(found, viewer), refused=refused
    )


async def download(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    path = viewer.own(f"invoices/{pages.part(request, 'number')}")
    return await viewer.download(path, format=request.match_info["kind"])


async def export_focus(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    return await viewer.download("/admin/v1/exports/focus", period=request.query.get("period", ""))


async def close_period(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    """Closes a month of one tenant, or of every tenant that is due for an invoice of it."""
    form = await pages.fields_of(request)
    if form.get("is_sure") != "yes":
        return await list_invoices(request, viewer, "Confirm that the month is closed for ever.", form)
    try:
        made = await viewer.post(
            "/admin/v1/invoices", {"period": form.get("period", ""), "project_id": form.get("project_id") or None}
        )
    except Refused as refused:
        return await list_invoices(request, viewer, refused.message, form)
    if left := made.get("refused"):
        names = await choices.names_of(viewer, (one["project_id"] for one in left))
        of_each = [f"{names.get(one['project_id'], one['project_id'])}: {one['message']}" for one in left]
        return await list_invoices(
            request, viewer, " ".join((f"{len(made['data'])} invoices were made.", *of_each)), form
        )
    if made["object"] == "list":
        return pages.see_other("/invoices", period=form["period"], num_closed=str(len(made["data"])))
    return pages.see_other(f"/invoices/{quote(made['number'], safe='')}")


async def give_credit(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    """Gives a credit once, however often the form is sent."""
    form = await pages.fields_of(request)
    try:
        amount = money.micro_units(form.get("amount", ""))
    except ValueError as error:
        return await list_invoices(request, viewer, str(error), form)
    wanted = {
        "type": form.get("type", ""),
        "project_id": form.get("project_id", ""),
        "amount_micro_units": amount,
        "currency": form.get("currency") or None,
        "corrects": form.get("corrects") or None,
        "note": form.get("note", ""),
    }
    try:
        await viewer.post_once("/admin/v1/credits", wanted, form.get("once", ""))
    except Refused as refused:
        return await list_invoices(request, viewer, refused.message, form)
    return pages.see_other("/invoices", project_id=wanted["project_id"], given=form["amount"])


async def list_invoices(
    request: web.Request, viewer: Viewer, message: str = "", form: Mapping[str, str] | None = None
) -> web.StreamResponse:
    asked = {} if message else choices.asked(request, FILTERS)
    found = await viewer.listed(viewer.own("invoices"), PAGE_ROWS, table="invoices", **asked)
    of_tenant = {"project_id": asked.get("project_id")}
    given = await viewer.listed(viewer.own("credits"), PAGE_ROWS, AFTER_CREDIT, table="credits", **of_tenant)
    tenants = await choices.tenants(viewer)
    credits = await choices.named(viewer, given["data"])
    tables = [_invoices(found, viewer), _credits(credits, viewer, next_page(given, AFTER_CREDIT))]
    return pages.show(
        request,
        viewer,
        "invoices.html",
        message=message,
        form=form or {},
        credit_types=CREDIT_TYPES,
        tenants=tenants,
        this_month=time.strftime("%Y-%m", time.gmtime()),
        once=(form or {}).get("once") or secrets.token_hex(16),
        filters=[name for name in FILTERS if viewer.sees_all or name != "project_id"],
        tables=tables,
        status=400 if message else 200,
    )


def _invoices(found: Mapping[str, Any], viewer: Viewer) -> Table:
    columns = (
        Column("number", "Number", link=lambda row: f"{pages.ROOT}/invoices/{quote(row['number'], safe='')}"),
        Column("period", "Month"),
        Column("project_name", "Tenant", names_tenant=True),
        Column("created_at", "Closed", "moment"),
        Column("state", "State", "state"),
        Column("num_requests", "Requests", "count"),
        money_column("net_micro_units", "Net"),
        money_column("tax_micro_units", "Tax"),
        money_column("paid_micro_units", "Prepaid"),
        money_column("due_micro_units", "Due"),
        money_column("balance_micro_units", "Open"),
        Column("due_at", "Pay by", "moment"),
        choices.TENANT_ID,
    )
    next_step = (
        "A month can be closed 48 hours after its end." if viewer.role == "operator" else "Preview a draft below."
    )
    empty = f"There is no invoice yet. {next_step}"
    return Table("invoices", choices.columns_for(viewer, columns), found["data"], empty, next_page(found))


def _credits(rows: Sequence[Mapping[str, Any]], viewer: Viewer, following: Mapping[str, str]) -> Table:
    columns = (
        Column("created_at", "Given", "moment"),
        Column("type", "Kind"),
        choices.TENANT,
        money_column("amount_micro_units", "Amount"),
        money_column("remaining_micro_units", "Left"),
        Column("expires_at", "Expires", "moment"),
        Column(
            "corrects",
            "Corrects request",
            "code",
            link=lambda row: f"{pages.ROOT}/requests/{quote(row['corrects'], safe='')}" if row["corrects"] else None,
        ),
        Column(
            "number",
            "Credit note",
            link=lambda row: f"{pages.ROOT}/invoices/{quote(row['number'], safe='')}" if row["number"] else None,
        ),
        Column("note", "Note", "words"),
        choices.TENANT_ID,
    )
    empty = "No credit was given."
    return Table("credits", choices.columns_for(viewer, columns), rows, empty, following)


def _lines(found: Mapping[str, Any], viewer: Viewer) -> Table:
    columns = (
        Column("kind", "Kind"),
        Column("period", "Month of use"),
        Column("model", "Model", link=_requests_of(found, viewer)),
        Column("tier", "Tier"),
        Column("token_class", "Class"),
        Column("price_version", "Price"),
        money_column("rate_micro_units_per_million", "Rate per million"),
        Column("num_requests", "Requests", "count"),
        Column("quantity", "Quantity", "count"),
        money_column("amount_micro_units", "Amount"),
        Column("note", "Note"),
    )
    rows = [{**line, "currency": found["currency"]} for line in found["lines"]]
    return Table(f"invoice-{found['number']}", columns, rows, "This invoice has no lines.")


def _requests_of(found: Mapping[str, Any], viewer: Viewer) -> Any:
    """Returns the link from a line of usage to its requests."""
    owner = {"project_id": found["project_id"]} if viewer.sees_all else {}

    def link(line: Mapping[str, Any]) -> str | None:
        if line["kind"] != "usage" or not line["model"]:
            return None
        start, end = periods.bounds(line["period"])
        asked = owner | {"model": line["model"], "from": spans.written(start), "until": spans.written(end)}
        asked |= {"service_tier": SERVICE_TIERS[line["tier"]]} if line["tier"] in SERVICE_TIERS else {}
        return str(URL(pages.ROOT + "/requests").with_query(asked))

    return link


ROUTES = [
    pages.get("/invoices", list_invoices),
    pages.post("/invoices/close", close_period),
    pages.post("/invoices/credits", give_credit),
    pages.get("/invoices/focus", export_focus),
    pages.get("/invoices/{number}", show_invoice),
    pages.get("/invoices/{number}/{kind}", download),
]
