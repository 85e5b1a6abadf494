"""The tables of what a document asks for: profiles of who bills and who is billed, terms of documents, payments.

All but `billing_profile` are append-only: triggers of migration 0018 refuse UPDATE and DELETE.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import CheckConstraint, ForeignKey, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from accounting.tables.models import Base


class BillingProfile(Base):
    """The one who bills, or who is billed, as it is now. A document keeps a copy of what it was issued with."""

    __tablename__ = "billing_profile"

    owner: Mapped[str] = mapped_column(primary_key=True)
    """A tenant's id, or `issuer`."""
    profile: Mapped[dict[str, Any]]
    changed_at: Mapped[int]


class Logo(Base):
    """A picture on documents, by its SHA-256. Documents name it for ever, so it is append-only."""

    __tablename__ = "logo"

    hash: Mapped[str] = mapped_column(primary_key=True)
    content: Mapped[bytes]


class InvoiceTerms(Base):
    """The terms of a document: what it asks for in whole units, from whom, by which rule of tax. One row for each invoice row."""

    __tablename__ = "invoice_terms"

    number: Mapped[str] = mapped_column(ForeignKey("invoice.number"), primary_key=True)
    prefix: Mapped[str]
    place: Mapped[int]
    """The number of the document among those of its prefix, without a gap."""
    issuer: Mapped[dict[str, Any]]
    customer: Mapped[dict[str, Any]]
    tax: Mapped[str]
    tax_rate: Mapped[int]
    tax_reason: Mapped[str]
    decimals: Mapped[int]
    """Decimals of the payable amounts; 6 for documents from before amounts were rounded."""
    discount: Mapped[int]
    """The part of the prepaid amount that was promotion."""
    net: Mapped[int]
    tax_amount: Mapped[int]
    paid: Mapped[int]
    due: Mapped[int]
    carried_in: Mapped[int]
    carried_out: Mapped[int]
    settled_before: Mapped[int]
    """The amount that was paid or credited of the void invoice that this one replaces."""
    due_at: Mapped[int]
    refers_to: Mapped[str | None] = mapped_column(ForeignKey("invoice.number"), index=True)
    """The invoice that a credit note corrects, or the one that an invoice replaces."""
    voids: Mapped[bool]
    """The credit note cancels all of the invoice."""
    note: Mapped[str]

    __table_args__ = (UniqueConstraint("prefix", "place"), CheckConstraint("due = net + tax_amount - paid", "due"))


class InvoicePayment(Base):
    """Money that came in for an invoice."""

    __tablename__ = "invoice_payment"

    number: Mapped[str] = mapped_column(ForeignKey("invoice.number"), primary_key=True)
    payment_no: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    amount: Mapped[int]
    paid_at: Mapped[int]
    reference: Mapped[str]
    created_at: Mapped[int]
    actor: Mapped[str]

    __table_args__ = (CheckConstraint("amount > 0", "amount"),)
