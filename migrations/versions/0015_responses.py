"""Stored responses, their events and totals, and the tenant's setting."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

STATES = "state IN ('queued', 'in_progress', 'completed', 'incomplete', 'failed', 'cancelled')"
IS_DUE = sa.text("state IN ('queued', 'in_progress')")


def upgrade() -> None:
    op.create_table(
        "response",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("tenant_id", sa.Text(), sa.ForeignKey("tenant.id"), nullable=False),
        sa.Column("key_id", sa.Text(), sa.ForeignKey("api_key.id"), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("is_background", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("previous_id", sa.Text(), nullable=True),
        sa.Column("num_before", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("chain_bytes", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("request", sa.LargeBinary(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=True),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.Column("fence", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("claimed_until_ms", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("is_stopping", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("next_number", sa.BigInteger(), server_default="0", nullable=False),
        sa.CheckConstraint(STATES, name=op.f("ck_response_state")),
    )
    op.create_index("ix_response_tenant_id_created_at", "response", ["tenant_id", "created_at"])
    op.create_index("ix_response_expires_at", "response", ["expires_at"])
    op.create_index("ix_response_due", "response", ["claimed_until_ms"], sqlite_where=IS_DUE, postgresql_where=IS_DUE)
    op.create_table(
        "response_events",
        sa.Column("response_id", sa.Text(), primary_key=True),
        sa.Column("first_number", sa.BigInteger(), autoincrement=False, primary_key=True),
        sa.Column("events", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["response_id"], ["response.id"], name=op.f("fk_response_events_response_id_response"), ondelete="CASCADE"
        ),
    )
    op.create_table(
        "response_total",
        sa.Column("tenant_id", sa.Text(), sa.ForeignKey("tenant.id"), primary_key=True),
        sa.Column("num_responses", sa.BigInteger(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
    )
    op.add_column("tenant", sa.Column("stores_responses", sa.Boolean(), server_default=sa.true(), nullable=False))
