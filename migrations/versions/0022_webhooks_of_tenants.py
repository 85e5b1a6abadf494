"""This revision adds who made a webhook: one that a tenant made for itself goes to public addresses only."""

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("webhook", sa.Column("is_tenants", sa.Boolean(), server_default=sa.false(), nullable=False))
