"""The texts of an invoice or a credit note, the same for HTML and PDF. Pure; knows no layout."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from accounting.billing.invoice_lines import Line
from accounting.billing.invoices import InvoiceInfo
from accounting.values import time_zones
from accounting.values.periods import DAY_S
from gateway.schema.money import grouped

CLASSES = {
    "cache_read": "cached input",
    "cache_write": "input, kept in the cache",
    "uncached": "input",
    "output": "output",
    "residency_cache": "kept in the cache (GB h)",
    "residency_pinned": "pinned in the cache (GB h)",
}
TIERS = {"": "", "interactive": "", "batch": "batch"}
BYTE_HOURS_PER_MILLI_GB = 10**6


class Row(msgspec.Struct, frozen=True):
    text: str
    detail: str
    quantity: str
    rate: str
    amount: str


class Bar(msgspec.Struct, frozen=True):
    day: int
    """The day of the month."""
    per_mille: int
    """The height, per mille of the highest day."""
    amount: str


class Document(msgspec.Struct, frozen=True):
    title: str
    number: str
    issuer: str
    customer: str
    customer_id: str
    period: str
    local_period: str
    """The period in the customer's time zone; empty if that is UTC."""
    issued: str
    currency: str
    rows: list[Row]
    totals: list[tuple[str, str]]
    """Pairs of label and amount. The last one is the amount due."""
    bars: list[Bar]
    highest: str


def document(info: InvoiceInfo) -> Document:
    is_note = info.series == "CN"
    totals = [("Subtotal", grouped(info.subtotal))]
    if info.prepaid:
        totals.append(("Paid from credits", grouped(-info.prepaid)))
    totals.append(("Credited" if is_note else "Amount due", grouped(info.total)))
    last_day = info.until_ms // 1000 - DAY_S
    return Document(
        title="Credit note" if is_note else "Invoice",
        number=info.number,
        issuer=info.issuer,
        customer=info.tenant_name,
        customer_id=info.tenant_id,
        period=f"{_date(info.from_ms // 1000)} to {_date(last_day)} (UTC)",
        local_period=_local_period(info),
        issued=_date(info.created_at),
        currency=info.currency,
        rows=[_row(line, info) for line in info.lines],
        totals=totals,
        bars=_bars(info),
        highest=grouped(max(info.days, default=0)),
    )


def _local_period(info: InvoiceInfo) -> str:
    if info.time_zone == time_zones.UTC:
        return ""
    start, end = (time_zones.shown(ms // 1000, info.time_zone) for ms in (info.from_ms, info.until_ms))
    return f"{start[:16]} to {end[:16]} ({info.time_zone})".replace("T", " ")


def _row(line: Line, info: InvoiceInfo) -> Row:
    late = f"used in {line.period}" if line.period != info.period else ""
    if line.kind != "usage":
        texts = {"adjustment": "Adjustment", "credit_note": "Credit", "prepaid": "Paid from prepaid credit"}
        detail = ", ".join(filter(None, (line.model, line.note, line.credit_id, late)))
        return Row(texts[line.kind], detail, "", "", grouped(line.amount))
    text = f"{line.model}: {CLASSES[line.token_class]}"
    requests = f"{line.num_requests:,} requests" if line.num_requests else ""
    detail = ", ".join(filter(None, (TIERS[line.tier], f"price {line.price_version}", requests, late)))
    return Row(text, detail, _quantity(line), grouped(line.rate), grouped(line.amount))


def _quantity(line: Line) -> str:
    """Formats a quantity: tokens, or GB hours cut to thousandths."""
    if not line.token_class.startswith("residency_"):
        return f"{line.quantity:,}"
    whole, rest = divmod(line.quantity // BYTE_HOURS_PER_MILLI_GB, 1000)
    return f"{whole:,}.{rest:03}"


def _bars(info: InvoiceInfo) -> list[Bar]:
    highest = max(info.days, default=0)
    if highest <= 0:
        return []
    return [Bar(day, charge * 1000 // highest, grouped(charge)) for day, charge in enumerate(info.days, 1)]


def _date(second: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(second))


def csv_records(info: InvoiceInfo) -> list[list[Any]]:
    """Returns a header, then a record per line; integers are micro-units and tokens."""
    names = [name for name in Line.__struct_fields__ if name != "currency"]
    head = ["invoice", "issuer", "tenant_id", "tenant_name", "invoice_period", "currency"]
    same = [info.number, info.issuer, info.tenant_id, info.tenant_name, info.period, info.currency]
    return [[*head, *names], *([*same, *(getattr(line, name) for name in names)] for line in info.lines)]
