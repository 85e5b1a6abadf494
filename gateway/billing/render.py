"""Renders an invoice in the requested type. HTML escapes everything; nothing is loaded from elsewhere."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping

import jinja2

from accounting.billing.invoices import DRAFT, InvoiceInfo
from accounting.exports import csv_text
from gateway.billing import einvoice
from gateway.billing.document import csv_records, document

PNG = b"\x89PNG"
_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("gateway.billing", "templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def html(info: InvoiceInfo, logo: bytes | None) -> bytes:
    picture = None if logo is None else base64.b64encode(logo).decode()
    kind = "png" if logo is not None and logo.startswith(PNG) else "jpeg"
    page = _TEMPLATES.get_template("invoice.html").render(doc=document(info), logo=picture, logo_type=kind)
    return page.encode()


def csv(info: InvoiceInfo, logo: bytes | None) -> bytes:
    return csv_text.lines(csv_records(info)).encode()


def as_pdf(info: InvoiceInfo, logo: bytes | None) -> bytes:
    """Returns a PDF for archives. It carries the XML of the invoice, if that is complete and final."""
    # Fonts and pictures take long to load, and a gateway that only serves tokens needs none.
    from gateway.billing import pdf

    is_electronic = info.number != DRAFT and not einvoice.missing(info)
    return pdf.render(document(info), info.created_at, logo, einvoice.xml(info) if is_electronic else None)


def xml(info: InvoiceInfo, logo: bytes | None) -> bytes:
    return einvoice.xml(info)


RENDERERS: Mapping[str, Callable[[InvoiceInfo, bytes | None], bytes]] = {
    "text/csv": csv,
    "text/html": html,
    "application/pdf": as_pdf,
    "application/xml": xml,
}
"""The renderers by type, except `application/json`, which the route itself writes."""
