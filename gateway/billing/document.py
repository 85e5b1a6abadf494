"""The texts of an invoice or a credit note, the same for HTML and PDF. It knows no layout."""

from __future__ import annotations

import time
from decimal import Decimal
from typing import Any

import msgspec

from accounting.billing.invoice_lines import Line
from accounting.billing.invoices import DRAFT, InvoiceInfo
from accounting.terms.parties import Issuer, Party
from accounting.terms.terms import Terms
from accounting.values import time_zones
from accounting.values.periods import DAY_S
from gateway.billing.texts import line_detail, line_title, safe
from gateway.schema.money import grouped, in_units, percentage

BYTE_HOURS_PER_MILLI_GB = 10**6
Labelled = list[tuple[str, str]]


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


class Document(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    number: str
    issuer: list[str]
    """The name, then the lines of the address and the numbers."""
    customer: list[str]
    facts: Labelled
    currency: str
    rows: list[Row]
    credits: list[Row]
    """Prepaid credits that were used."""
    totals: Labelled
    """Pairs of label and amount. The last one is the amount to pay."""
    payment: Labelled
    """How and when to pay; empty if nothing is open."""
    notes: list[str]
    bars: list[Bar]
    highest: str
    country: str
    """The customer's country, which decides between the forms of a Chinese character."""

    def texts(self) -> str:
        """Returns every text of the document."""
        cells = [text for row in (*self.rows, *self.credits) for text in msgspec.structs.astuple(row)]
        pairs = [text for pair in (*self.facts, *self.totals, *self.payment) for text in pair]
        return "".join((self.title, self.number, *self.issuer, *self.customer, *cells, *pairs, *self.notes))


def document(info: InvoiceInfo) -> Document:
    return Document(
        title="Credit note" if info.series == "CN" else "Invoice",
        number="draft" if info.number == DRAFT else info.number,
        issuer=_party(info.terms.issuer),
        customer=[*_party(info.terms.customer), safe(info.tenant_id)],
        facts=_facts(info),
        currency=info.currency,
        rows=[_row(line, info) for line in info.lines if line.kind != "prepaid"],
        credits=[_row(line, info) for line in info.lines if line.kind == "prepaid"],
        totals=_totals(info),
        payment=_payment(info),
        notes=_notes(info),
        bars=_bars(info),
        highest=grouped(max(info.days, default=0)),
        country=info.terms.customer.country,
    )


def _party(party: Party) -> list[str]:
    place = " ".join(filter(None, (party.postal_code, party.city)))
    lines = (
        party.name,
        party.street,
        party.street_more,
        ", ".join(filter(None, (place, party.region, party.country))),
        party.vat_number and f"VAT number {party.vat_number}",
        party.tax_number and f"Tax number {party.tax_number}",
        party.company_number and f"Company number {party.company_number}",
        party.email,
        party.phone,
    )
    return [safe(line) for line in lines if line]


def _facts(info: InvoiceInfo) -> Labelled:
    terms = info.terms
    is_invoice = info.series == "INV"
    facts = (
        ("Period", f"{_date(info.from_ms // 1000)} to {_date(info.until_ms // 1000 - DAY_S)} (UTC)"),
        ("Local time", _local_period(info)),
        ("Issued", _date(info.created_at)),
        ("Due", _date(terms.due_at) if is_invoice else ""),
        ("Purchase order", terms.customer.purchase_order),
        ("Your reference", terms.customer.buyer_reference),
        ("Replaces" if is_invoice else "Corrects", terms.refers_to or ""),
    )
    return [(label, safe(text)) for label, text in facts if text]


def _totals(info: InvoiceInfo) -> Labelled:
    terms, sums, currency = info.terms, info.terms.amounts, info.currency
    rounding = sums.net - (info.subtotal - terms.discount)
    totals = [("Subtotal", f"{grouped(info.subtotal)} {currency}")]
    if terms.discount:
        totals.append(("Promotional credit", f"{grouped(-terms.discount)} {currency}"))
    if rounding:
        totals.append(("Rounding, carried between documents", f"{grouped(rounding)} {currency}"))

    def whole(label: str, amount: int) -> None:
        totals.append((label, f"{in_units(amount, terms.decimals)} {currency}"))

    whole("Net", sums.net)
    whole(_tax_label(terms), sums.tax)
    whole("Total", sums.net + sums.tax)
    if sums.paid:
        whole("Paid from prepaid credit", -sums.paid)
    whole("Credited" if info.series == "CN" else "Amount due", sums.due)
    if terms.settled_before:
        whole("Paid or credited before", -terms.settled_before)
        whole("Open", terms.to_pay)
    return totals


def _tax_label(terms: Terms) -> str:
    return f"VAT {percentage(terms.rule.rate)} %"


def _payment(info: InvoiceInfo) -> Labelled:
    terms = info.terms
    issuer: Issuer = terms.issuer
    if info.series == "CN" or terms.to_pay <= 0:
        return []
    facts = (
        ("Pay by", _date(terms.due_at)),
        ("Account", issuer.iban and (issuer.account_name or issuer.name)),
        ("IBAN", " ".join(issuer.iban[i : i + 4] for i in range(0, len(issuer.iban), 4))),
        ("BIC", issuer.bic),
        ("Reference", "" if info.number == DRAFT else info.number),
        ("", issuer.payment_note),
    )
    return [(label, safe(text)) for label, text in facts if text]


def _notes(info: InvoiceInfo) -> list[str]:
    notes = (
        "This is a draft of what was used so far. It is no invoice." if info.number == DRAFT else "",
        info.terms.note,
        info.terms.rule.reason and f"{info.terms.rule.reason}.",
        "Each request's charge is rounded once, half to even, to a millionth; a line is the sum of these charges.",
        "What rounding to whole units leaves over is carried to the next document."
        if info.terms.amounts.carried_out
        else "",
    )
    return [safe(note) for note in notes if note]


def _local_period(info: InvoiceInfo) -> str:
    if info.time_zone == time_zones.UTC:
        return ""
    start, end = (time_zones.shown(ms // 1000, info.time_zone) for ms in (info.from_ms, info.until_ms))
    return f"{start[:16]} to {end[:16]} ({info.time_zone})".replace("T", " ")


def _row(line: Line, info: InvoiceInfo) -> Row:
    title, detail = safe(line_title(line)), safe(line_detail(line, info.period))
    if line.kind != "usage":
        return Row(title, detail, "", "", grouped(line.amount))
    return Row(title, detail, _quantity(line), grouped(line.rate), grouped(line.amount))


def _quantity(line: Line) -> str:
    """Formats a quantity: tokens, or GB hours cut to thousandths."""
    if not line.token_class.startswith("residency_"):
        return f"{line.quantity:,}"
    whole, rest = divmod(abs(line.quantity) // BYTE_HOURS_PER_MILLI_GB, 1000)
    return f"{'-' if line.quantity < 0 else ''}{whole:,}.{rest:03}"


def _bars(info: InvoiceInfo) -> list[Bar]:
    highest = max(info.days, default=0)
    if highest <= 0:
        return []
    return [Bar(day, max(0, charge) * 1000 // highest, grouped(charge)) for day, charge in enumerate(info.days, 1)]


def _date(second: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(second))


def csv_records(info: InvoiceInfo) -> list[list[Any]]:
    """Returns a header, then a record per line, and the tax and the rounding, so that the amounts add up to what is due.
    Amounts and rates are in the currency."""
    names = [name for name in Line.__struct_fields__ if name != "currency"]
    head = ["invoice", "issuer", "tenant_id", "tenant_name", "invoice_period", "currency"]
    same = [info.number, info.issuer, info.tenant_id, info.tenant_name, info.period, info.currency]
    sums = info.terms.amounts
    extra = {"rounding": sums.net - sums.paid - info.total, "tax": sums.tax}
    added = [Line(kind=kind, period=info.period, amount=amount) for kind, amount in extra.items() if amount]
    return [[*head, *names], *([*same, *(_cell(line, name) for name in names)] for line in (*info.lines, *added))]


def _cell(line: Line, name: str) -> Any:
    value = getattr(line, name)
    return Decimal(value).scaleb(-6) if name in ("amount", "rate") else value
