"""An invoice as XML of EN 16931, in the syntax of Factur-X (UN/CEFACT CII). The library factur-x writes the XML; this
module says which term has which value.

A line is a sum of charges in micro-units, and the standard wants two decimals that add up. So lines are rounded by the
largest remainders, and what is carried from and to other documents is a separate line.
"""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

from accounting.billing.invoice_lines import Line
from accounting.billing.invoices import InvoiceInfo
from accounting.terms import amounts
from accounting.terms.parties import OWED_BY_CUSTOMER, Party
from accounting.values import currencies
from accounting.values.periods import DAY_S
from gateway.billing.texts import line_detail, line_title, safe
from gateway.schema.money import percentage

INVOICE, CREDIT_NOTE = "380", "381"
SEPA_TRANSFER, TRANSFER = "58", "30"
PIECE = "C62"
MOST_DECIMALS = 2
TOKENS_OF_A_RATE = 1_000_000
NOT_SUBJECT = "not_subject"


class IncompleteError(Exception):
    """Something that the standard demands is missing. The message names it and says where it is set."""


def missing(info: InvoiceInfo) -> list[str]:
    """Returns what the standard demands and the invoice does not have."""
    terms = info.terms
    issuer, customer = terms.issuer, terms.customer
    ids = (issuer.company_number,) if terms.rule.tax == NOT_SUBJECT else (issuer.vat_number, issuer.tax_number)
    identifies = " or ".join(("company number",) if terms.rule.tax == NOT_SUBJECT else ("VAT number", "tax number"))
    wants = {
        "the issuer's country": issuer.country,
        f"the issuer's {identifies}": any(ids),
        "the customer's country": customer.country,
        "amounts of at most two decimals": terms.decimals <= MOST_DECIMALS,
    }
    if terms.rule.tax in OWED_BY_CUSTOMER:
        wants["the customer's VAT number"] = customer.vat_number
        wants["the issuer's VAT number"] = issuer.vat_number
    return [name for name, is_there in wants.items() if not is_there]


def xml(info: InvoiceInfo) -> bytes:
    """Raises IncompleteError."""
    if lacking := missing(info):
        raise IncompleteError(
            f"{info.number} is not an invoice of EN 16931: it lacks {', '.join(lacking)}. Profiles are set by `headgate"
            " issuer set` and `headgate billing set`; a closed invoice is issued again by `headgate invoice void`."
        )
    # The library loads XML schemas and an HTTP client, and a gateway that only serves tokens needs none.
    from facturx.generate_xml import generate_cii_xml

    made: bytes = generate_cii_xml(_terms(info), level="en16931", check_xsd=True, check_schematron=None)
    return made


def _terms(info: InvoiceInfo) -> dict[str, Any]:
    terms, rule = info.terms, info.terms.rule
    sign = -1 if info.series == "CN" else 1
    money = _Money(sign)
    unit = currencies.unit(terms.decimals)
    discount = amounts.rounded(terms.discount, unit)
    lines = _lines(info, sign, discount, unit)
    net, tax, paid = terms.amounts.net, terms.amounts.tax, terms.amounts.paid + terms.settled_before
    vat = {} if rule.tax == NOT_SUBJECT else {"rate": percentage(rule.rate)}
    category = {"vat_category_code": rule.code} | ({"vat_rate": vat["rate"]} if vat else {})
    breakdown = {"BT-116": money(net), "BT-117": money(tax), "BT-118": rule.code}
    breakdown |= {"BT-119": vat["rate"]} if vat else {}
    breakdown |= {"BT-120": rule.reason} if rule.reason and rule.tax not in ("standard", "zero") else {}
    allowance = {"amount": money(discount), "reason": "Promotional credit", **category}
    return {
        "BT-1": info.number,
        "BT-2": _day(info.created_at),
        "BT-3": INVOICE if sign > 0 else CREDIT_NOTE,
        "BT-5": info.currency,
        "BT-9": _day(terms.due_at) if sign > 0 else None,
        "BT-10": terms.customer.buyer_reference,
        "BT-13": terms.customer.purchase_order,
        "BT-20": terms.issuer.payment_note,
        "BT-73": _day(info.from_ms // 1000),
        "BT-74": _day(info.until_ms // 1000 - DAY_S),
        "BG-1": [{"BT-22": safe(terms.note)}] if terms.note else [],
        "BG-3": [{"BT-25": terms.refers_to}] if terms.refers_to else [],
        "BG-4": _party(terms.issuer, rule.tax),
        "BG-7": _party(terms.customer, rule.tax),
        "BG-13": {"name": safe(terms.customer.name), "country_code": terms.customer.country},
        "BG-20": [allowance] if discount else [],
        "BG-23": [breakdown],
        "BG-25": [_line(number, line, amount, money, rule.code, vat) for number, (line, amount) in enumerate(lines, 1)],
        "BT-106": money(net + discount),
        **({"BT-107": money(discount)} if discount else {}),
        "BT-109": money(net),
        "BT-110": money(tax),
        "BT-112": money(net + tax),
        **({"BT-113": money(paid)} if paid else {}),
        "BT-115": money(terms.to_pay),
        **(_account(info) if sign > 0 else {}),
    }


class _Money:
    """Writes amounts. On a credit note they are turned round, as its type says that they are taken back."""

    def __init__(self, sign: int) -> None:
        self.sign = sign

    def __call__(self, amount: int) -> str:
        return f"{Decimal(self.sign * amount).scaleb(-6):.2f}"


def _lines(info: InvoiceInfo, sign: int, discount: int, unit: int) -> list[tuple[Line, int]]:
    billed = [line for line in info.lines if line.kind != "prepaid"]
    made = list(zip(billed, amounts.shares([line.amount for line in billed], unit), strict=True))
    carried = info.terms.amounts.net + discount - sum(amount for _, amount in made)
    if carried:
        made.append((Line(kind="rounding", period=info.period, amount=carried), carried))
    return made


def _line(number: int, line: Line, amount: int, money: _Money, code: str, vat: dict[str, str]) -> dict[str, Any]:
    signed = money.sign * amount
    is_usage = line.kind == "usage" and not line.token_class.startswith("residency_")
    # A price is never below 0: what takes back has a quantity below 0.
    price = {
        "BT-129": str(money.sign * line.quantity) if is_usage else "-1" if signed < 0 else "1",
        "BT-146": f"{Decimal(line.rate).scaleb(-6).normalize():f}" if is_usage else money(abs(signed) * money.sign),
        **({"BT-149": str(TOKENS_OF_A_RATE)} if is_usage else {}),
    }
    return {
        "BT-126": str(number),
        "BT-130": PIECE,
        "BT-131": money(amount),
        "BT-151": code,
        **({"BT-152": vat["rate"]} if vat else {}),
        "BT-153": safe(line_title(line)),
        **({"BT-154": detail} if (detail := safe(line_detail(line, line.period))) else {}),
        **price,
    }


def _party(party: Party, tax: str) -> dict[str, Any]:
    """Returns a party. An invoice that is not subject to VAT must name no VAT number (BR-O-02)."""
    contact = {name: text for name, text in (("phone", party.phone), ("email", party.email)) if text}
    values = {
        "name": safe(party.name),
        "country_code": party.country,
        "city": party.city,
        "postcode": party.postal_code,
        "addr_l1": party.street,
        "addr_l2": party.street_more,
        "country_subdivision": party.region,
        "legal_identifier": party.company_number,
        "vat_identifier": "" if tax == NOT_SUBJECT else party.vat_number,
        "tax_identifier": "" if tax == NOT_SUBJECT else party.tax_number,
    }
    made: dict[str, Any] = {name: text for name, text in values.items() if text}
    if contact:
        made["contacts"] = [{"name": safe(party.name), **contact}]
    return made


def _account(info: InvoiceInfo) -> dict[str, str]:
    issuer = info.terms.issuer
    if not issuer.iban:
        return {}
    return {
        "BT-81": SEPA_TRANSFER if info.currency == "EUR" else TRANSFER,
        "BT-83": info.number,
        "BT-84": issuer.iban,
        "BT-85": issuer.account_name or issuer.name,
        **({"BT-86": issuer.bic} if issuer.bic else {}),
    }


def _day(second: int) -> date:
    return datetime.fromtimestamp(second, UTC).date()
