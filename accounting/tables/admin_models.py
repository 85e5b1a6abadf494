"""Tables of the admin API that are neither tenants nor keys. The rules of models.py apply."""

from __future__ import annotations

from sqlalchemy import CheckConstraint, ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from accounting.tables.models import Base


class ModelPermission(Base):
    """The models that a tenant's keys may use. A tenant without a row may use all models."""

    __tablename__ = "model_permission"

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenant.id"), primary_key=True)
    mode: Mapped[str]
    model_ids: Mapped[list[str]]

    __table_args__ = (CheckConstraint("mode IN ('allow_list', 'deny_list')", "mode"),)


class SpendLimit(Base):
    """A tenant's hard monthly budget under OpenAI's name. For the operator's tenant it bounds all spending."""

    __tablename__ = "spend_limit"

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenant.id"), primary_key=True)
    cents: Mapped[int]
    budget_id: Mapped[str | None] = mapped_column(ForeignKey("budget.id"))
    """The budget of the limit. It is None for the operator's limit, which the limiter does not hold."""

    __table_args__ = (CheckConstraint("cents >= 0", "cents"),)


class SpendAlert(Base):
    """A mail that is due once in each month in which `cents` were spent: by the tenant, or by all for the operator's
    tenant."""

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
