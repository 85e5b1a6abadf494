"""Bodies and objects of `/admin/v1/issuer`, of tenants' billing profiles, and of payments and voids. The module
holds shapes only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from accounting.billing.invoice_lines import Line
from accounting.terms import parties
from accounting.terms.parties import MAX_CHARS, MAX_PAYMENT_DAYS, Customer, Issuer, Tax
from accounting.values.budget_types import MAX_AMOUNT
from gateway.schema.convert import OwnBody, convert
from gateway.schema.invoices import Second, tax_rule

Text = Annotated[str, Meta(max_length=MAX_CHARS)] | UnsetType
Days = Annotated[int, Meta(ge=0, le=MAX_PAYMENT_DAYS)] | UnsetType
Rate = Annotated[int, Meta(ge=0, le=1_000_000)] | UnsetType
C = TypeVar("C", bound=msgspec.Struct)


class PartyChanges(OwnBody, frozen=True):
    """An absent field stays as it was; null sets the default."""

    name: Text = UNSET
    street: Text = UNSET
    street_more: Text = UNSET
    city: Text = UNSET
    postal_code: Text = UNSET
    region: Text = UNSET
    country: Text = UNSET
    vat_number: Text = UNSET
    tax_number: Text = UNSET
    company_number: Text = UNSET
    email: Text = UNSET
    phone: Text = UNSET
    tax: Tax | UnsetType = UNSET
    tax_rate: Rate = UNSET
    """Millionths of the net amount: 190000 is 19 %."""
    tax_reason: Text = UNSET
    payment_days: Days = UNSET
    invoice_prefix: Text = UNSET
    credit_note_prefix: Text = UNSET


class IssuerChanges(PartyChanges, frozen=True):
    iban: Text = UNSET
    bic: Text = UNSET
    account_name: Text = UNSET
    payment_note: Text = UNSET
    logo: str | UnsetType = UNSET
    """A PNG or JPEG picture in base64."""


class CustomerChanges(PartyChanges, frozen=True):
    purchase_order: Text = UNSET
    buyer_reference: Text = UNSET


class NewPayment(OwnBody, frozen=True):
    amount_micro_units: Annotated[int, Meta(ge=1, le=MAX_AMOUNT)] | None = None
    """The default is all that is open."""
    reference: Annotated[str, Meta(max_length=MAX_CHARS)] = ""
    """A reference that the invoice has already is the same payment."""
    paid_at: Second | None = None


class NewVoid(OwnBody, frozen=True):
    reason: Annotated[str, Meta(min_length=1, max_length=MAX_CHARS)]


def changes(body: Mapping[str, Any], kind: type[C]) -> dict[str, Any]:
    """Returns the fields that the body names; None stands for the default. Raises `ApiError`."""
    given = convert(body, kind)
    named = [name for name in kind.__struct_fields__ if name in body]
    return {name: None if body[name] is None else getattr(given, name) for name in named}


def issuer(profile: Issuer) -> dict[str, Any]:
    return {"object": "issuer", **msgspec.structs.asdict(profile)}


def customer(tenant_id: str, profile: Customer, issuer: Issuer) -> dict[str, Any]:
    """Returns the profile with the rule under which its invoices are taxed, and whose rule that is."""
    rule = tax_rule(parties.tax_rule(issuer, profile)) | {"owner": "issuer" if profile.tax is None else "project"}
    fields = msgspec.structs.asdict(profile)
    return {"object": "billing_profile", "project_id": tenant_id, **fields, "tax_rule": rule}


def uninvoiced(tenant_id: str, currency: str, lines: Sequence[Line]) -> dict[str, Any]:
    return {
        "object": "tenant.uninvoiced",
        "project_id": tenant_id,
        "currency": currency,
        "amount_micro_units": sum(line.amount for line in lines),
        "periods": sorted({line.period for line in lines}),
    }
