"""This revision adds the setting that divides a tenant's KV by its keys or by their end users."""

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("tenant") as table:
        table.add_column(sa.Column("cache_isolation", sa.Text(), server_default="tenant", nullable=False))
