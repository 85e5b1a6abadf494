"""This adds what end users with limits took in the last day, what caches kept for tenants, and what was charged for
it.
"""

import sqlalchemy as sa
from alembic import op

from accounting.database.append_only import refuse_edits

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "end_user_use",
        sa.Column("request_id", sa.Text(), primary_key=True),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("place", sa.Text(), nullable=False),
        sa.Column("opened_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("ended_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("input", sa.BigInteger(), nullable=False),
        sa.Column("output", sa.BigInteger(), nullable=False),
    )
    op.create_index("ix_end_user_use_tenant_id_opened_at_ms", "end_user_use", ["tenant_id", "opened_at_ms"])
    op.create_table(
        "residency_reading",
        sa.Column("hour", sa.BigInteger(), autoincrement=False, primary_key=True),
        sa.Column("tenant_id", sa.Text(), primary_key=True),
        sa.Column("model", sa.Text(), primary_key=True),
        sa.Column("process", sa.Text(), primary_key=True),
        sa.Column("cache", sa.BigInteger(), nullable=False),
        sa.Column("pinned", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "residency_charge",
        sa.Column("request_id", sa.Text(), primary_key=True),
        sa.Column("attempt", sa.BigInteger(), autoincrement=False, primary_key=True),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("hour", sa.BigInteger(), nullable=False),
        sa.Column("price_version", sa.Text(), nullable=False),
        sa.Column("currency", sa.Text(), nullable=False),
        sa.Column("cache", sa.BigInteger(), nullable=False),
        sa.Column("pinned", sa.BigInteger(), nullable=False),
        sa.Column("charge_cache", sa.BigInteger(), nullable=False),
        sa.Column("charge_pinned", sa.BigInteger(), nullable=False),
        sa.Column("posted_at_ms", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("cache >= 0 AND pinned >= 0", name=op.f("ck_residency_charge_sums")),
        sa.CheckConstraint("charge_cache >= 0 AND charge_pinned >= 0", name=op.f("ck_residency_charge_charges")),
    )
    op.create_index("ix_residency_charge_tenant_id_hour", "residency_charge", ["tenant_id", "hour"])
    op.create_index("ix_residency_charge_hour", "residency_charge", ["hour"])
    refuse_edits("residency_charge")
