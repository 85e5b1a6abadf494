"""Invoices and credits: the list, one invoice with its lines and files, the close of a month, a new credit, the FOCUS
export.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import msgspec
from aiohttp import web
from yarl import URL

from accounting.values import periods
from gateway.console import choices, pages, spans
from gateway.console.calls import Refused
from gateway.console.tables import Column, Table, chosen
from gateway.console.viewer import Viewer
from gateway.schema import money

FILTERS = ("project_id", "period")
FILES = {"pdf": "PDF", "xml": "XML (EN 16931)", "html": "HTML", "csv": "CSV"}
CREDIT_TYPES = {
    "grant": "Grant: prepaid money",
    "adjustment": "Adjustment of a request that is on no invoice yet",
    "credit_note": "Credit note for a request on an invoice",
}
PAGE_ROWS = 100


async def list_invoices(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    return await _list(request, viewer)


async def show_invoice(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    return await invoice_page(request, viewer, await viewer.get(own_path(viewer, request.match_info["number"])))


async def invoice_page(
    request: web.Request, viewer: Viewer, found: Mapping[str, Any], refused: Refused | None = None
) -> web.Response:
    """Shows an invoice, or the draft of one. A refusal of a payment or of a void stands above it."""
    page = pages.show(
        request, viewer, "invoice.html", found=found, files=FILES, table=_lines(found, viewer), refused=refused
    )
    if refused is not None:
        page.set_status(refused.status)
    return page


async def download(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    return await _file(viewer, own_path(viewer, request.match_info["number"]), "format", request.match_info["kind"])


async def export_focus(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    return await _file(viewer, "/admin/v1/exports/focus", "period", request.query.get("period", ""))


async def _file(viewer: Viewer, path: str, name: str, value: str) -> web.StreamResponse:
    """Returns a file of the API. Raises `Refused`, so that a refusal is a page and no file."""
    answer = await viewer.forward("GET", path, b"", "", **{name: value})
    if isinstance(answer, web.Response) and answer.status >= 400:
        error = msgspec.json.decode(answer.body)["error"]  # type: ignore[arg-type]  # errors of the API have JSON bodies
        raise Refused(answer.status, error["message"], error.get("code") or "")
    return answer


async def close_period(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    """Closes a month of one tenant, or of every tenant with usage in it."""
    form = await pages.fields_of(request)
    if form.get("is_sure") != "yes":
        return await _list(request, viewer, "Confirm that the month is closed for ever.", form)
    try:
        made = await viewer.post(
            "/admin/v1/invoices", {"period": form.get("period", ""), "project_id": form.get("project_id") or None}
        )
    except Refused as refused:
        return await _list(request, viewer, refused.message, form)
    if made["object"] == "list":
        return pages.see_other("/invoices", period=form["period"], num_closed=str(len(made["data"])))
    return pages.see_other(f"/invoices/{made['number']}")


async def give_credit(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    """Gives a credit once, however often the form is sent."""
    form = await pages.fields_of(request)
    try:
        amount = money.micro_units(form.get("amount", ""))
    except ValueError as error:
        return await _list(request, viewer, str(error), form)
    wanted = {
        "type": form.get("type", ""),
        "project_id": form.get("project_id", ""),
        "amount_micro_units": amount,
        "currency": form.get("currency") or "USD",
        "corrects": form.get("corrects") or None,
        "note": form.get("note", ""),
    }
    try:
        await viewer.post_once("/admin/v1/credits", wanted, form.get("once", ""))
    except Refused as refused:
        return await _list(request, viewer, refused.message, form)
    return pages.see_other("/invoices", project_id=wanted["project_id"], given=form["amount"])


async def _list(
    request: web.Request, viewer: Viewer, message: str = "", form: Mapping[str, str] | None = None
) -> web.StreamResponse:
    asked = (
        {name: request.query[name] for name in (*FILTERS, "after") if request.query.get(name)} if not message else {}
    )
    found = await viewer.get(own_path(viewer), limit=PAGE_ROWS, **asked)
    given = await viewer.get(
        "/admin/v1/credits" if viewer.sees_all else "/v1/credits", limit=PAGE_ROWS, project_id=asked.get("project_id")
    )
    tenants = await choices.tenants(viewer)
    credits = choices.named(given["data"], {one["id"]: one["name"] for one in tenants})
    tables = [_invoices(found, viewer), _credits(credits, viewer)]
    page = pages.show(
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
        table=chosen(tables, request.query.get("table")),
    )
    if message:
        page.set_status(400)
    return page


def own_path(viewer: Viewer, number: str | None = None) -> str:
    path = "/admin/v1/invoices" if viewer.sees_all else "/v1/invoices"
    return path if number is None else f"{path}/{number}"


def _invoices(found: Mapping[str, Any], viewer: Viewer) -> Table:
    project = [Column("project_name", "Tenant")] if viewer.sees_all else []
    project_id = [choices.TENANT_ID] if viewer.sees_all else []
    columns = (
        Column("number", "Number", link=lambda row: f"{pages.ROOT}/invoices/{quote(row['number'])}"),
        Column("period", "Month"),
        *project,
        Column("created_at", "Closed", "moment"),
        Column("state", "State", "state"),
        Column("num_requests", "Requests", "count"),
        Column("net_micro_units", "Net", "money", currency="currency"),
        Column("tax_micro_units", "Tax", "money", currency="currency"),
        Column("paid_micro_units", "Prepaid", "money", currency="currency"),
        Column("due_micro_units", "Due", "money", currency="currency"),
        Column("balance_micro_units", "Open", "money", currency="currency"),
        Column("due_at", "Pay by", "moment"),
        *project_id,
    )
    following = {"after": found["last_id"]} if found["has_more"] else {}
    empty = "There is no invoice yet. A month can be closed 48 hours after its end."
    return Table("invoices", columns, found["data"], empty, following)


def _credits(rows: Sequence[Mapping[str, Any]], viewer: Viewer) -> Table:
    columns = (
        Column("created_at", "Given", "moment"),
        Column("type", "Kind"),
        *([choices.TENANT] if viewer.sees_all else []),
        Column("amount_micro_units", "Amount", "money", currency="currency"),
        Column("remaining_micro_units", "Left", "money", currency="currency"),
        Column("expires_at", "Expires", "moment"),
        Column(
            "corrects",
            "Corrects request",
            "code",
            link=lambda row: f"{pages.ROOT}/requests/{quote(row['corrects'])}" if row["corrects"] else None,
        ),
        Column(
            "number",
            "Credit note",
            link=lambda row: f"{pages.ROOT}/invoices/{quote(row['number'])}" if row["number"] else None,
        ),
        Column("note", "Note", "words"),
        *([choices.TENANT_ID] if viewer.sees_all else []),
    )
    empty = "No credit was given."
    return Table("credits", columns, rows, empty)


def _lines(found: Mapping[str, Any], viewer: Viewer) -> Table:
    columns = (
        Column("kind", "Kind"),
        Column("period", "Month of use"),
        Column("model", "Model", link=_requests_of(found, viewer)),
        Column("tier", "Tier"),
        Column("token_class", "Class"),
        Column("price_version", "Price"),
        Column("rate_micro_units_per_million", "Rate per million", "money"),
        Column("num_requests", "Requests", "count"),
        Column("quantity", "Quantity", "count"),
        Column("amount_micro_units", "Amount", "money", currency="currency"),
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
