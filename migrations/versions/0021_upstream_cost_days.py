"""Bills of providers by the day: the amounts with their corrections, the state of reading them, and the credential of the
cost API."""

import sqlalchemy as sa
from alembic import op

from accounting.database.append_only import refuse_edits

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

DAYS = "upstream_cost_day"


def upgrade() -> None:
    op.add_column("upstream", sa.Column("sealed_cost_key", sa.LargeBinary(), nullable=True))
    op.create_table(
        DAYS,
        sa.Column("upstream", sa.Text(), primary_key=True),
        sa.Column("day", sa.BigInteger(), autoincrement=False, primary_key=True),
        sa.Column("line_item", sa.Text(), primary_key=True),
        sa.Column("currency", sa.Text(), primary_key=True),
        sa.Column("revision", sa.BigInteger(), autoincrement=False, primary_key=True),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.Column("pulled_at_ms", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("day % 86400 = 0", name=op.f(f"ck_{DAYS}_day")),
        sa.CheckConstraint("revision > 0", name=op.f(f"ck_{DAYS}_revision")),
    )
    op.create_index("ix_upstream_cost_day_day", DAYS, ["day"])
    op.create_table(
        "upstream_cost_pull",
        sa.Column("upstream", sa.Text(), primary_key=True),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in _NUMBERS),
        sa.Column("fault", sa.Text(), nullable=False),
    )
    refuse_edits(DAYS)


_NUMBERS = ("claimed_until_ms", "tried_at_ms", "pulled_at_ms", "first_day")
