"""Tables of the admin surface that are neither tenants nor keys. Same rules as models.py."""

from __future__ import annotations

from sqlalchemy import CheckConstraint, ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from accounting.tables.models import Base


class ModelPermission(Base):
    """Which models a tenant's keys may use; without a row: all."""

    __tablename__ = "model_permission"

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenant.id"), primary_key=True)
    mode: Mapped[str]
    model_ids: Mapped[list[str]]

    __table_args__ = (CheckConstraint("mode IN ('allow_list', 'deny_list')", "mode"),)


class SpendLimit(Base):
    """A tenant's hard monthly budget under OpenAI's name, or, of the operator's tenant, the bound on all spending."""

    __tablename__ = "spend_limit"

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenant.id"), primary_key=True)
    cents: Mapped[int]
    budget_id: Mapped[str | None] = mapped_column(ForeignKey("budget.id"))
    """None: the operator's, which no limiter holds."""

    __table_args__ = (CheckConstraint("cents >= 0", "cents"),)


class SpendAlert(Base):
    """Mail is due once per month in which so much was spent: by the tenant, or of the operator's tenant by all."""

    __tablename__ = "spend_alert"

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenant.id"), index=True)
    cents: Mapped[int]
    recipients: Mapped[list[str]]
    subject_prefix: Mapped[str | None]
    created_at: Mapped[int]
    deleted_at: Mapped[int | None]


class SpendAlertDue(Base):
    __tablename__ = "spend_alert_due"

    alert_id: Mapped[str] = mapped_column(ForeignKey("spend_alert.id"), primary_key=True)
    period_start_ms: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    cents: Mapped[int]
    """The threshold that was passed."""
    spent_micro_units: Mapped[int]
    at_ms: Mapped[int]
    sent_at_ms: Mapped[int | None]
