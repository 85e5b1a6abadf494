"""Budgets with their adjustments and alerts, quotas, and what rebuilds the limiter."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

MAX_AMOUNT = 2**53 - 1


def upgrade() -> None:
    _budgets()
    _limiter()


def _budgets() -> None:
    op.create_table(
        "budget",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("tenant_id", sa.Text(), sa.ForeignKey("tenant.id"), nullable=False),
        sa.Column("key_id", sa.Text(), sa.ForeignKey("api_key.id"), nullable=True),
        sa.Column("model", sa.Text(), nullable=True),
        sa.Column("tier", sa.Text(), nullable=True),
        sa.Column("period", sa.Text(), nullable=False),
        sa.Column("start_ms", sa.BigInteger(), nullable=False),
        sa.Column("end_ms", sa.BigInteger(), nullable=False),
        sa.Column("limit_micro_units", sa.BigInteger(), nullable=False),
        sa.Column("hardness", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("deleted_at", sa.BigInteger(), nullable=True),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("period IN ('hour', 'day', 'month', 'fixed')", name=op.f("ck_budget_period")),
        sa.CheckConstraint("period <> 'fixed' OR end_ms > start_ms", name=op.f("ck_budget_interval")),
        sa.CheckConstraint("hardness IN ('hard', 'soft', 'shadow')", name=op.f("ck_budget_hardness")),
        sa.CheckConstraint(
            f"limit_micro_units >= 0 AND limit_micro_units <= {MAX_AMOUNT}", name=op.f("ck_budget_limit")
        ),
    )
    op.create_index(op.f("ix_budget_tenant_id"), "budget", ["tenant_id"])
    op.create_table(
        "budget_adjustment",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("budget_id", sa.Text(), sa.ForeignKey("budget.id"), nullable=False),
        sa.Column("micro_units", sa.BigInteger(), nullable=False),
        sa.Column("from_ms", sa.BigInteger(), nullable=False),
        sa.Column("until_ms", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("until_ms > from_ms", name=op.f("ck_budget_adjustment_interval")),
    )
    op.create_index(op.f("ix_budget_adjustment_budget_id"), "budget_adjustment", ["budget_id"])
    op.create_table(
        "budget_alert",
        sa.Column("budget_id", sa.Text(), sa.ForeignKey("budget.id"), primary_key=True),
        sa.Column("period_start_ms", sa.BigInteger(), primary_key=True),
        sa.Column("threshold", sa.BigInteger(), primary_key=True),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("used_micro_units", sa.BigInteger(), nullable=False),
        sa.Column("limit_micro_units", sa.BigInteger(), nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.Column("sent_at_ms", sa.BigInteger(), nullable=True),
    )
    op.create_index(
        "ix_budget_alert_unsent",
        "budget_alert",
        ["at_ms"],
        sqlite_where=sa.text("sent_at_ms IS NULL"),
        postgresql_where=sa.text("sent_at_ms IS NULL"),
    )
    op.create_table(
        "quota",
        sa.Column("tenant_id", sa.Text(), sa.ForeignKey("tenant.id"), primary_key=True),
        sa.Column("level", sa.Text(), primary_key=True),
        sa.Column("subject", sa.Text(), primary_key=True),
        sa.Column("dimension", sa.Text(), primary_key=True),
        sa.Column("limit", sa.BigInteger(), nullable=False),
        sa.Column("shadow", sa.Boolean(), nullable=False),
        sa.CheckConstraint("level IN ('key', 'tenant', 'model', 'end_user')", name=op.f("ck_quota_level")),
        sa.CheckConstraint(f'"limit" >= 0 AND "limit" <= {MAX_AMOUNT}', name=op.f("ck_quota_limit")),
    )


def _limiter() -> None:
    op.create_table(
        "limiter_incident",
        sa.Column("epoch", sa.BigInteger(), autoincrement=False, primary_key=True),
        sa.Column("tenant_id", sa.Text(), nullable=True),
        sa.Column("life", sa.Text(), nullable=True),
        sa.Column("raised_at_ms", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "limiter_gateway",
        sa.Column("slot", sa.BigInteger(), autoincrement=False, primary_key=True),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("listed_at_ms", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "limiter_running",
        sa.Column("epoch", sa.BigInteger(), autoincrement=False, primary_key=True),
        sa.Column("request_id", sa.Text(), primary_key=True),
        sa.Column("slot", sa.BigInteger(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("opened_ms", sa.BigInteger(), nullable=False),
        sa.Column("detail", sa.LargeBinary(), nullable=False),
    )
    op.create_index("ix_limiter_running_tenant_id_epoch", "limiter_running", ["tenant_id", "epoch"])
    op.create_table(
        "limiter_built",
        sa.Column("tenant_id", sa.Text(), primary_key=True),
        sa.Column("epoch", sa.BigInteger(), autoincrement=False, primary_key=True),
        sa.Column("slot", sa.BigInteger(), nullable=False),
        sa.Column("claimed_at_ms", sa.BigInteger(), nullable=False),
    )
