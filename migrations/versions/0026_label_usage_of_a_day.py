"""This revision adds an index of the sums by label, so that those of a tenant's day are counted without its other days."""

from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_label_usage_of_day", "label_usage", ["tenant_id", "day_ms", "value"])
