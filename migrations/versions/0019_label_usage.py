"""Daily sums of the request log by end user and by metadata."""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

KEY = ("tenant_id", "label", "day_ms", "value", "model", "currency")
SUMS = ("num_requests", "prompt_tokens", "cached_tokens", "output_tokens", "charge")


def upgrade() -> None:
    op.create_table(
        "label_usage",
        *(sa.Column(name, sa.BigInteger() if name == "day_ms" else sa.Text(), nullable=False) for name in KEY),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in SUMS),
        sa.PrimaryKeyConstraint(*KEY, name=op.f("pk_label_usage")),
    )
    op.create_index("ix_label_usage_day_ms", "label_usage", ["day_ms"])
