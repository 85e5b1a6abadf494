"""Webhooks, and events on their way to them."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

JSON = sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")


def upgrade() -> None:
    op.create_table(
        "installation",
        sa.Column("id", sa.BigInteger(), autoincrement=False, primary_key=True),
        sa.Column("uuid", sa.Text(), nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck_installation_one")),
    )
    op.create_table(
        "webhook",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("tenant_id", sa.Text(), sa.ForeignKey("tenant.id"), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("events", JSON, nullable=True),
        sa.Column("secret", sa.LargeBinary(), nullable=False),
        sa.Column("is_full", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
    )
    op.create_index("ix_webhook_tenant_id", "webhook", ["tenant_id"])
    op.create_table(
        "outbox_lane",
        sa.Column("tenant_id", sa.Text(), sa.ForeignKey("tenant.id"), primary_key=True),
        sa.Column("last_turn_ms", sa.BigInteger(), server_default="0", nullable=False),
    )
    _create_outbox()


def _create_outbox() -> None:
    op.create_table(
        "outbox",
        sa.Column("event_id", sa.Text(), primary_key=True),
        sa.Column("webhook_id", sa.Text(), sa.ForeignKey("webhook.id"), primary_key=True),
        sa.Column("lane", sa.Text(), sa.ForeignKey("outbox_lane.tenant_id"), nullable=False),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), server_default="pending", nullable=False),
        sa.Column("attempts", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("deliver_after_ms", sa.BigInteger(), nullable=False),
        sa.Column("claimed_until_ms", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("last_error", sa.Text(), nullable=True),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("ended_at_ms", sa.BigInteger(), nullable=True),
        sa.CheckConstraint("state IN ('pending', 'delivered', 'dead')", name=op.f("ck_outbox_state")),
        sa.CheckConstraint("(state = 'pending') = (ended_at_ms IS NULL)", name=op.f("ck_outbox_ended")),
    )
    pending = sa.text("ended_at_ms IS NULL")
    op.create_index(
        "ix_outbox_due", "outbox", ["lane", "deliver_after_ms"], sqlite_where=pending, postgresql_where=pending
    )
    op.create_index("ix_outbox_lane_claimed_until_ms", "outbox", ["lane", "claimed_until_ms"])
    op.create_index("ix_outbox_webhook_id_state", "outbox", ["webhook_id", "state"])
    op.create_index("ix_outbox_state_ended_at_ms", "outbox", ["state", "ended_at_ms"])
