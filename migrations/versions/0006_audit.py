"""Keys that rotate, rest and are bound to addresses; models a tenant may use; limits and
alerts of spending; erased tenants; indexes of the audit log."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

JSON_TEXT = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")
KEY_COLUMNS = ("disabled", "addresses", "previous_hash", "previous_until", "streams_ended")
AUDIT_INDEXES = ("tenant_id", "object_id")


def upgrade() -> None:
    with op.batch_alter_table("api_key") as table:
        table.add_column(sa.Column("disabled", sa.Boolean(), server_default=sa.false(), nullable=False))
        table.add_column(sa.Column("addresses", JSON_TEXT, nullable=True))
        table.add_column(sa.Column("previous_hash", sa.LargeBinary(), nullable=True))
        table.add_column(sa.Column("previous_until", sa.BigInteger(), nullable=True))
        table.add_column(sa.Column("streams_ended", sa.BigInteger(), nullable=True))
    with op.batch_alter_table("tenant") as table:
        table.add_column(sa.Column("erased_at", sa.BigInteger(), nullable=True))
    op.create_table(
        "model_permission",
        sa.Column("tenant_id", sa.Text(), sa.ForeignKey("tenant.id"), primary_key=True),
        sa.Column("mode", sa.Text(), nullable=False),
        sa.Column("model_ids", JSON_TEXT, nullable=False),
        sa.CheckConstraint("mode IN ('allow_list', 'deny_list')", name=op.f("ck_model_permission_mode")),
    )
    _spending()
    for column in AUDIT_INDEXES:
        op.create_index(op.f(f"ix_audit_log_{column}"), "audit_log", [column])


def _spending() -> None:
    op.create_table(
        "spend_limit",
        sa.Column("tenant_id", sa.Text(), sa.ForeignKey("tenant.id"), primary_key=True),
        sa.Column("cents", sa.BigInteger(), nullable=False),
        sa.Column("budget_id", sa.Text(), sa.ForeignKey("budget.id"), nullable=True),
        sa.CheckConstraint("cents >= 0", name=op.f("ck_spend_limit_cents")),
    )
    op.create_table(
        "spend_alert",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("tenant_id", sa.Text(), sa.ForeignKey("tenant.id"), nullable=False),
        sa.Column("cents", sa.BigInteger(), nullable=False),
        sa.Column("recipients", JSON_TEXT, nullable=False),
        sa.Column("subject_prefix", sa.Text(), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("deleted_at", sa.BigInteger(), nullable=True),
    )
    op.create_index(op.f("ix_spend_alert_tenant_id"), "spend_alert", ["tenant_id"])
    op.create_table(
        "spend_alert_due",
        sa.Column("alert_id", sa.Text(), sa.ForeignKey("spend_alert.id"), primary_key=True),
        sa.Column("period_start_ms", sa.BigInteger(), autoincrement=False, primary_key=True),
        sa.Column("cents", sa.BigInteger(), nullable=False),
        sa.Column("spent_micro_units", sa.BigInteger(), nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.Column("sent_at_ms", sa.BigInteger(), nullable=True),
    )
