"""Renders an invoice in the requested type. HTML escapes everything; nothing is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jinja2

from accounting.billing.invoices import InvoiceInfo
from accounting.exports import csv_text
from gateway.billing.document import csv_records, document

_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("gateway.billing", "templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def html(info: InvoiceInfo) -> bytes:
    return _TEMPLATES.get_template("invoice.html").render(doc=document(info)).encode()


def csv(info: InvoiceInfo) -> bytes:
    return csv_text.lines(csv_records(info)).encode()


def as_pdf(info: InvoiceInfo) -> bytes:
    # Fonts and pictures take long to load, and a gateway that only serves tokens needs none.
    from gateway.billing import pdf

    return pdf.render(document(info), info.created_at)


RENDERERS: Mapping[str, Callable[[InvoiceInfo], bytes]] = {
    "text/csv": csv,
    "text/html": html,
    "application/pdf": as_pdf,
}
"""The renderers by type, except `application/json`, which the route itself writes."""
