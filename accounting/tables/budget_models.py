"""Tables of budgets, their alerts and quotas. Times ending in `_ms` are Unix milliseconds, intervals half open."""

from __future__ import annotations

from sqlalchemy import CheckConstraint, ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from accounting.tables.models import Base


class BudgetRow(Base):
    """A budget. Scope and period never change, as the charges to the row would mean something else afterwards."""

    __tablename__ = "budget"

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenant.id"), index=True)
    key_id: Mapped[str | None] = mapped_column(ForeignKey("api_key.id"))
    model: Mapped[str | None]
    tier: Mapped[str | None]
    period: Mapped[str]
    start_ms: Mapped[int]
    end_ms: Mapped[int]
    limit_micro_units: Mapped[int]
    hardness: Mapped[str]
    created_at: Mapped[int]
    deleted_at: Mapped[int | None]
    version: Mapped[int]
    """The auth epoch of the last change."""

    __table_args__ = (
        CheckConstraint("period IN ('hour', 'day', 'month', 'fixed')", "period"),
        CheckConstraint("period <> 'fixed' OR end_ms > start_ms", "interval"),
        CheckConstraint("hardness IN ('hard', 'soft', 'shadow')", "hardness"),
        CheckConstraint("limit_micro_units >= 0 AND limit_micro_units <= 9007199254740991", "limit"),
    )


class BudgetAdjustment(Base):
    __tablename__ = "budget_adjustment"

    id: Mapped[str] = mapped_column(primary_key=True)
    budget_id: Mapped[str] = mapped_column(ForeignKey("budget.id"), index=True)
    micro_units: Mapped[int]
    from_ms: Mapped[int]
    until_ms: Mapped[int]
    created_at: Mapped[int]

    __table_args__ = (CheckConstraint("until_ms > from_ms", "interval"),)


class BudgetAlert(Base):
    """An alert, due once per budget, period and threshold. Nothing sets `sent_at_ms`: events and mails have tables of their
    own."""

    __tablename__ = "budget_alert"

    budget_id: Mapped[str] = mapped_column(ForeignKey("budget.id"), primary_key=True)
    period_start_ms: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    threshold: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """Percent of the limit."""
    tenant_id: Mapped[str]
    used_micro_units: Mapped[int]
    limit_micro_units: Mapped[int]
    at_ms: Mapped[int]
    sent_at_ms: Mapped[int | None]


class QuotaRow(Base):
    """A limit besides the columns of tenant, key and model. A missing row means that there is no such limit."""

    __tablename__ = "quota"

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenant.id"), primary_key=True)
    level: Mapped[str] = mapped_column(primary_key=True)
    subject: Mapped[str] = mapped_column(primary_key=True)
    dimension: Mapped[str] = mapped_column(primary_key=True)
    limit: Mapped[int]
    shadow: Mapped[bool]

    __table_args__ = (
        CheckConstraint("level IN ('key', 'tenant', 'model', 'end_user')", "level"),
        CheckConstraint('"limit" >= 0 AND "limit" <= 9007199254740991', "limit"),
    )
