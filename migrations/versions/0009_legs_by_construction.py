"""PostgreSQL makes legs out of the entries themselves: the foreign key proved it again for each of them.

SQLite keeps it: there it costs little, and to drop it would be to write the table anew.
"""

from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

NAME = "fk_ledger_leg_request_id_kind_attempt_ledger_entry"
KEY = ["request_id", "kind", "attempt"]


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.drop_constraint(NAME, "ledger_leg", type_="foreignkey")
