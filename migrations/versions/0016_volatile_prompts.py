"""Tenants whose system prompts have their volatile lines moved behind what the cache can serve."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tenant", sa.Column("cache_moves_volatile", sa.Boolean(), server_default=sa.false(), nullable=False))
