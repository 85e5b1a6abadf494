"""Time zones in which tenants are shown moments, on invoices as it was then."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

TABLES = ("tenant", "invoice")


def upgrade() -> None:
    for table in TABLES:
        op.add_column(table, sa.Column("time_zone", sa.Text(), server_default="UTC", nullable=False))
