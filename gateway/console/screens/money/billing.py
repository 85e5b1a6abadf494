"""Billing: the profile of the issuer and of each customer, the draft of a month that still runs, payments and void
invoices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from aiohttp import web

from gateway.console import pages
from gateway.console.calls import Refused
from gateway.console.screens.money.invoices import invoice_page
from gateway.console.viewer import Viewer
from gateway.schema import money

PARTY = {
    "name": "Name on documents",
    "street": "Street",
    "street_more": "Street, second line",
    "postal_code": "Postal code",
    "city": "City",
    "region": "State or region",
    "country": "Country (DE)",
    "vat_number": "VAT number (DE136695976)",
    "tax_number": "Number at the tax office",
    "company_number": "Company number",
    "email": "Mail",
    "phone": "Phone",
}
ISSUER = {
    "iban": "IBAN",
    "bic": "BIC",
    "account_name": "Holder of the account",
    "payment_note": "Sentence about payment",
}
CUSTOMER = {"purchase_order": "Purchase order", "buyer_reference": "The customer's reference"}
TERMS = {
    "payment_days": "Days to pay",
    "tax_rate": "Tax rate in percent",
    "tax_reason": "Reason that is printed",
    "invoice_prefix": "Prefix of invoices (EU-)",
    "credit_note_prefix": "Prefix of credit notes (EU-CN-)",
}
MAX_UPLOAD_BYTES = 128 * 1024
"""The largest form with a logo. The API says how large a logo may be."""
TAXES = ("", "standard", "zero", "exempt", "reverse_charge", "intra_community", "export", "not_subject")


async def change(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    """Stores a profile. An empty field sets the default; the logo has a form of its own."""
    form = await pages.fields_of(request)
    names = [*_fields(request), "tax"]
    wanted: dict[str, Any] = {name: form.get(name) or None for name in names}
    try:
        wanted["tax_rate"] = money.tax_rate(form.get("tax_rate") or "0")
        if wanted["payment_days"] is not None:
            wanted["payment_days"] = int(wanted["payment_days"])
    except ValueError as error:
        return await show_profile(request, viewer, Refused(400, str(error), ""), form)
    try:
        await viewer.patch(_api_path(request), wanted)
    except Refused as refused:
        return await show_profile(request, viewer, refused, form)
    return pages.see_other(_own_page(request), done="changed")


async def change_logo(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    """Stores the picture of the issuer's documents, or removes it."""
    form = await pages.fields_of(request)
    try:
        if not form.get("logo") and "remove" not in form:
            raise Refused(400, "Choose a file.")
        await viewer.patch(_api_path(request), {"logo": None if "remove" in form else form["logo"]})
    except Refused as refused:
        return await show_profile(request, viewer, refused)
    return pages.see_other(_own_page(request), done="changed")


async def draft(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    """Shows the invoice that a close of the month would make of what was used so far."""
    tenant, period = request.query.get("project_id", ""), request.query.get("period", "")
    path = f"/admin/v1/tenants/{quote(tenant, safe='')}/invoice-preview" if viewer.sees_all else "/v1/invoice-preview"
    return await invoice_page(request, viewer, await viewer.get(path, period=period))


async def pay(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    form = await pages.fields_of(request)
    try:
        amount = money.micro_units(form["amount"]) if form.get("amount") else None
    except ValueError as error:
        return await _again(request, viewer, Refused(400, str(error), ""))
    wanted = {"amount_micro_units": amount, "reference": form.get("reference", "")}
    return await _done(request, viewer, "payments", wanted)


async def void(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    form = await pages.fields_of(request)
    return await _done(request, viewer, "void", {"reason": form.get("reason") or None})


async def _done(request: web.Request, viewer: Viewer, what: str, wanted: dict[str, Any]) -> web.StreamResponse:
    number = pages.part(request, "number")
    try:
        await viewer.post(viewer.own(f"invoices/{number}/{what}"), wanted)
    except Refused as refused:
        return await _again(request, viewer, refused)
    return pages.see_other(f"/invoices/{number}")


async def _again(request: web.Request, viewer: Viewer, refused: Refused) -> web.StreamResponse:
    found = await viewer.get(viewer.own(f"invoices/{pages.part(request, 'number')}"))
    return await invoice_page(request, viewer, found, refused)


async def show_profile(
    request: web.Request, viewer: Viewer, refused: Refused | None = None, form: Mapping[str, str] | None = None
) -> web.StreamResponse:
    found = await viewer.get(_api_path(request))
    shown = {**found, "tax_rate": money.percentage(found["tax_rate"]), **(form or {})}
    rule = found.get("tax_rule")
    taxed = f"{rule['tax'].replace('_', ' ')}, {money.percentage(rule['rate'])} %" if rule else ""
    return pages.show(
        request,
        viewer,
        "billing_profile.html",
        found=found,
        values=shown,
        fields=_fields(request),
        taxes=TAXES,
        taxed=taxed,
        refused=refused,
        own_address=pages.ROOT + _own_page(request),
    )


def _fields(request: web.Request) -> dict[str, str]:
    return PARTY | (CUSTOMER if "id" in request.match_info else ISSUER) | TERMS


def _api_path(request: web.Request) -> str:
    return (
        f"/admin/v1/tenants/{pages.part(request, 'id')}/billing" if "id" in request.match_info else "/admin/v1/issuer"
    )


def _own_page(request: web.Request) -> str:
    return f"/tenants/{pages.part(request, 'id')}/billing" if "id" in request.match_info else "/issuer"


ROUTES = [
    pages.get("/issuer", show_profile),
    pages.post("/issuer", change),
    pages.post("/issuer/logo", change_logo, MAX_UPLOAD_BYTES),
    pages.get("/tenants/{id}/billing", show_profile),
    pages.post("/tenants/{id}/billing", change),
    pages.get("/invoices/draft", draft),
    pages.post("/invoices/{number}/pay", pay),
    pages.post("/invoices/{number}/void", void),
]
