"""This adds what each tenant may keep in the prefix cache of a worker."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("tenant") as table:
        table.add_column(sa.Column("cache_floor_blocks", sa.BigInteger(), server_default="0", nullable=False))
        table.add_column(sa.Column("cache_quota_blocks", sa.BigInteger(), nullable=True))
        table.add_column(sa.Column("cache_ttl_s", sa.BigInteger(), nullable=True))
        table.add_column(sa.Column("cache_read", sa.Boolean(), server_default=sa.true(), nullable=False))
        table.add_column(sa.Column("cache_write", sa.Boolean(), server_default=sa.true(), nullable=False))
