"""KV that workers' caches kept for tenants, by hour, and the charges for it."""

from __future__ import annotations

from sqlalchemy import CheckConstraint, Index
from sqlalchemy.orm import Mapped, mapped_column

from accounting.tables.models import Base


class ResidencyReading(Base):
    """A worker process's own sums of one hour so far. They only rise, so a later value replaces an earlier one."""

    __tablename__ = "residency_reading"

    hour: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """The first Unix second of the hour."""
    tenant_id: Mapped[str] = mapped_column(primary_key=True)
    model: Mapped[str] = mapped_column(primary_key=True)
    process: Mapped[str] = mapped_column(primary_key=True)
    cache: Mapped[int]
    """Byte-milliseconds, as in all sums here."""
    pinned: Mapped[int]


class ResidencyCharge(Base):
    """One ledger entry of kind `residency`: an hour of one tenant and model. Readings that came late make a further
    attempt."""

    __tablename__ = "residency_charge"

    request_id: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    tenant_id: Mapped[str]
    model: Mapped[str]
    hour: Mapped[int]
    price_version: Mapped[str]
    currency: Mapped[str]
    cache: Mapped[int]
    pinned: Mapped[int]
    charge_cache: Mapped[int]
    charge_pinned: Mapped[int]
    posted_at_ms: Mapped[int]

    __table_args__ = (
        CheckConstraint("cache >= 0 AND pinned >= 0", "sums"),
        CheckConstraint("charge_cache >= 0 AND charge_pinned >= 0", "charges"),
        Index("ix_residency_charge_tenant_id_hour", "tenant_id", "hour"),
        Index("ix_residency_charge_hour", "hour"),
    )
