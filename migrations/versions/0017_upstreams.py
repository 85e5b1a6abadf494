"""Upstreams: declared ones, what was bought of them, what their providers bill; and tenants that buy."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

CLASSES = ("cache_read", "cache_write", "uncached", "output")


def upgrade() -> None:
    op.add_column("tenant", sa.Column("buys_overflow", sa.Boolean(), server_default=sa.false(), nullable=False))
    op.create_table(
        "upstream",
        sa.Column("name", sa.Text(), primary_key=True),
        sa.Column("declared", sa.Text(), nullable=False),
        sa.Column("sealed_key", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "upstream_call",
        sa.Column("request_id", sa.Text(), primary_key=True),
        sa.Column("attempt", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("upstream", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("started_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("provider_id", sa.Text(), nullable=False),
        sa.Column("has_statement", sa.Boolean(), nullable=False),
        *(sa.Column(f"stated_{name}", sa.BigInteger(), nullable=False) for name in CLASSES),
        *(sa.Column(f"judged_{name}", sa.BigInteger(), nullable=False) for name in CLASSES),
        sa.Column("drift", sa.Text(), nullable=False),
        sa.Column("expected_cost", sa.BigInteger(), nullable=False),
        sa.Column("stated_cost", sa.BigInteger(), nullable=True),
        sa.CheckConstraint("state IN ('delivered', 'cut', 'failed')", name=op.f("ck_upstream_call_state")),
    )
    op.create_index("ix_upstream_call_started_at_ms", "upstream_call", ["started_at_ms"])
    op.create_index("ix_upstream_call_provider_id", "upstream_call", ["upstream", "provider_id"])
    op.create_table(
        "upstream_cost",
        sa.Column("upstream", sa.Text(), primary_key=True),
        sa.Column("row_id", sa.Text(), primary_key=True),
        sa.Column("provider_id", sa.Text(), nullable=False),
        sa.Column("billed_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.Column("matched", sa.BigInteger(), nullable=False),
        sa.Column("account", sa.Text(), nullable=False),
        sa.Column("posted_at_ms", sa.BigInteger(), nullable=False),
    )
    op.create_index("ix_upstream_cost_provider_id", "upstream_cost", ["upstream", "provider_id"])
