"""Bodies and objects of `/admin/v1/invoices` and `/admin/v1/credits`. The module holds shapes only."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from accounting.billing.credits import CreditInfo, NewCredit
from accounting.billing.invoice_lines import Line
from accounting.billing.invoices import InvoiceInfo
from accounting.terms.parties import TaxRule
from accounting.values.budget_types import MAX_AMOUNT
from accounting.values.periods import LAST_SECOND
from gateway.schema import forms
from gateway.schema.convert import OwnBody

Id = Annotated[str, Meta(min_length=1, max_length=200)]
Second = Annotated[int, Meta(ge=0, le=LAST_SECOND)]


class NewInvoice(OwnBody, frozen=True):
    period: Annotated[str, Meta(pattern=forms.MONTH)]
    project_id: Id | None = None
    """The default is every tenant that used something in that month."""


class CreditFields(OwnBody, frozen=True):
    type: Literal["grant", "credit_note", "adjustment"]
    project_id: Id
    amount_micro_units: Annotated[int, Meta(ge=1, le=MAX_AMOUNT)]
    currency: Annotated[str, Meta(pattern=forms.CURRENCY)] | None = None
    """The default is the one that the project pays in; a grant in another one is refused."""
    source: Literal["cash", "promotion"] = "cash"
    priority: Annotated[int, Meta(ge=0, le=1_000_000)] = 100
    starts_at: Second | None = None
    expires_at: Second | None = None
    corrects: Id | None = None
    """The request whose charge a credit note or an adjustment corrects."""
    note: Annotated[str, Meta(max_length=500)] = ""

    def wanted(self) -> NewCredit:
        return NewCredit(
            type=self.type,
            tenant_id=self.project_id,
            amount=self.amount_micro_units,
            currency=self.currency,
            source=self.source,
            priority=self.priority,
            starts_at=self.starts_at,
            expires_at=self.expires_at,
            corrects=self.corrects,
            note=self.note,
        )


def credit(info: CreditInfo) -> dict[str, Any]:
    return {
        "id": info.id,
        "object": "credit",
        "type": info.type,
        "project_id": info.tenant_id,
        "currency": info.currency,
        "amount_micro_units": info.amount,
        "remaining_micro_units": info.remaining,
        "source": info.source,
        "priority": info.priority,
        "starts_at": info.starts_at,
        "expires_at": info.expires_at,
        "corrects": info.corrects,
        "number": info.number,
        "note": info.note,
        "created_at": info.created_at,
    }


def invoice(info: InvoiceInfo) -> dict[str, Any]:
    """Returns the invoice, with its lines if they were read."""
    lines = {"lines": [_line(line) for line in info.lines]} if info.lines else {}
    return {
        "id": info.number,
        "object": "invoice" if info.series == "INV" else "credit_note",
        "number": info.number,
        "issuer": info.issuer,
        "project_id": info.tenant_id,
        "project_name": info.tenant_name,
        "time_zone": info.time_zone,
        "period": info.period,
        "version": info.version,
        "currency": info.currency,
        "from": info.from_ms // 1000,
        "until": info.until_ms // 1000,
        "created_at": info.created_at,
        "num_requests": info.num_requests,
        "subtotal_micro_units": info.subtotal,
        "prepaid_micro_units": info.prepaid,
        "total_micro_units": info.total,
        "days_micro_units": info.days,
        **_terms(info),
        **lines,
    }


def _terms(info: InvoiceInfo) -> dict[str, Any]:
    """Returns what the document asks for, from whom, and how it stands."""
    terms = info.terms
    amounts = msgspec.structs.asdict(terms.amounts)
    return {
        "state": info.standing.state,
        "balance_micro_units": info.standing.balance,
        "replaced_by": info.standing.replaced_by,
        "refers_to": terms.refers_to,
        "voids": terms.voids,
        "note": terms.note,
        "due_at": terms.due_at,
        "currency_decimals": terms.decimals,
        "discount_micro_units": terms.discount,
        **{f"{name}_micro_units": amount for name, amount in amounts.items()},
        "tax_rule": tax_rule(terms.rule),
        "issuer_profile": msgspec.structs.asdict(terms.issuer),
        "customer_profile": msgspec.structs.asdict(terms.customer),
    }


def tax_rule(rule: TaxRule) -> dict[str, Any]:
    return {"tax": rule.tax, "category": rule.code, "rate": rule.rate, "reason": rule.reason}


def _line(line: Line) -> dict[str, Any]:
    return {
        "kind": line.kind,
        "period": line.period,
        "model": line.model,
        "tier": line.tier,
        "token_class": line.token_class,
        "price_version": line.price_version,
        "rate_micro_units_per_million": line.rate,
        "num_requests": line.num_requests,
        "quantity": line.quantity,
        "amount_micro_units": line.amount,
        "credit_id": line.credit_id,
        "note": line.note,
    }
