"""The tables of billing: month sums, day seals, invoices with their lines, credits and their uses.

All but `rollup_month` are append-only: triggers of migration 0005 refuse UPDATE and DELETE.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import CheckConstraint, ForeignKey, ForeignKeyConstraint, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from accounting.tables.models import Base, EngineRecordRow, LedgerEntry, Rollup


class RollupMonth(Rollup, Base):
    __tablename__ = "rollup_month"


class PriceResidency(Base):
    """Prices of a model's KV that is kept for a tenant: micro-units per GB (10^9 bytes) and hour. Without a row it is
    not charged."""

    __tablename__ = "price_residency"

    sheet_id: Mapped[str] = mapped_column(primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    model: Mapped[str] = mapped_column(primary_key=True)
    cache: Mapped[int]
    pinned: Mapped[int]

    __table_args__ = (
        ForeignKeyConstraint(["sheet_id", "version"], ["price_sheet_version.sheet_id", "price_sheet_version.version"]),
        *(CheckConstraint(f"{name} >= 0 AND {name} <= 1000000000000", name) for name in ("cache", "pinned")),
    )


class DaySeal(Base):
    """A hash over the rows posted in one UTC day, and over the seal before it."""

    __tablename__ = "day_seal"

    day: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """The first Unix second of the day."""
    num_entries: Mapped[int]
    hash: Mapped[bytes]
    sealed_at_ms: Mapped[int]


class Invoice(Base):
    """A closed period of one tenant, or a credit note. `sequence` has no gap in its series."""

    __tablename__ = "invoice"

    number: Mapped[str] = mapped_column(primary_key=True)
    issuer: Mapped[str]
    series: Mapped[str]
    """The series: INV or CN."""
    sequence: Mapped[int]
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenant.id"))
    tenant_name: Mapped[str]
    """The tenant's name at the time of the invoice."""
    time_zone: Mapped[str] = mapped_column(server_default="UTC")
    """The tenant's time zone at the time of the invoice."""
    period: Mapped[str]
    """The month, written like `2026-10`."""
    version: Mapped[int]
    """The value is 1 for an invoice. For a credit note it is the number among those of the tenant and period."""
    currency: Mapped[str]
    from_ms: Mapped[int]
    until_ms: Mapped[int]
    cutoff_ms: Mapped[int]
    """Rows that were posted up to this time are in. Later ones are in a later invoice."""
    created_at: Mapped[int]
    num_requests: Mapped[int]
    subtotal: Mapped[int]
    """The sum of usage and adjustments."""
    prepaid: Mapped[int]
    """The part that grants pay."""
    total: Mapped[int]
    """The amount that is due: subtotal - prepaid."""
    days: Mapped[list[Any]]
    """The charges of each day of the period."""

    __table_args__ = (
        UniqueConstraint("tenant_id", "period", "series", "version"),
        UniqueConstraint("series", "sequence"),
        CheckConstraint("series IN ('INV', 'CN')", "series"),
        CheckConstraint("total = subtotal - prepaid", "total"),
    )


class InvoiceLine(Base):
    """A sum of rollups by model, tier, class and price; or an adjustment; or the payment of a grant (below 0)."""

    __tablename__ = "invoice_line"

    number: Mapped[str] = mapped_column(ForeignKey("invoice.number"), primary_key=True)
    line_no: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    kind: Mapped[str]
    """One of usage, adjustment, credit_note, prepaid."""
    period: Mapped[str]
    """The month of the usage. It is earlier than the invoice's for usage that was posted after that month was
    closed."""
    model: Mapped[str]
    tier: Mapped[str]
    token_class: Mapped[str]
    price_version: Mapped[str]
    rate: Mapped[int]
    """Micro-units per million tokens. For the classes `residency_…` they are per GB and hour, and `quantity` is in
    byte-hours."""
    num_requests: Mapped[int]
    """The number of requests, on the first line of their model, tier and price; 0 on the other lines."""
    quantity: Mapped[int]
    amount: Mapped[int]
    credit_id: Mapped[str | None] = mapped_column(ForeignKey("credit.id"), index=True)
    note: Mapped[str]

    __table_args__ = (CheckConstraint("kind IN ('usage', 'adjustment', 'credit_note', 'prepaid')", "kind"),)


class Credit(Base):
    """A prepaid grant; or a correction, which points at the ledger row that it corrects."""

    __tablename__ = "credit"

    id: Mapped[str] = mapped_column(primary_key=True)
    type: Mapped[str]
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenant.id"), index=True)
    currency: Mapped[str]
    amount: Mapped[int]
    source: Mapped[str | None]
    """The source of a grant: cash or promotion. It is None for corrections."""
    priority: Mapped[int]
    """The order of grants: the lowest is used first, then the one that ends first."""
    starts_at: Mapped[int]
    expires_at: Mapped[int | None]
    corrects_request_id: Mapped[str | None]
    note: Mapped[str]
    created_at: Mapped[int]
    actor: Mapped[str]
    idempotency_key: Mapped[str] = mapped_column(unique=True)
    fingerprint: Mapped[bytes]

    __table_args__ = (
        CheckConstraint("type IN ('grant', 'credit_note', 'adjustment')", "type"),
        CheckConstraint("amount > 0", "amount"),
        CheckConstraint("(type = 'grant') = (corrects_request_id IS NULL)", "corrects"),
        Index("ix_credit_corrects_request_id", "corrects_request_id"),
    )


class CreditUse(Base):
    """An amount that an invoice took from a grant, or the rest that expired unused."""

    __tablename__ = "credit_use"

    credit_id: Mapped[str] = mapped_column(ForeignKey("credit.id"), primary_key=True)
    use_no: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    kind: Mapped[str]
    amount: Mapped[int]
    number: Mapped[str] = mapped_column(ForeignKey("invoice.number"), index=True)

    __table_args__ = (
        CheckConstraint("kind IN ('grant_use', 'grant_expiry')", "kind"),
        CheckConstraint("amount > 0", "amount"),
    )


# Rows come in the order of time, so on PostgreSQL a BRIN index finds them by a few bytes per range of pages.
Index("ix_ledger_entry_posted_at_ms", LedgerEntry.posted_at_ms, postgresql_using="brin")
Index("ix_ledger_entry_opened_at_ms", LedgerEntry.opened_at_ms, postgresql_using="brin")
Index("ix_engine_record_posted_at_ms", EngineRecordRow.posted_at_ms, postgresql_using="brin")
