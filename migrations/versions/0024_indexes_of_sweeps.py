"""This revision adds indexes, so that sweeps read only the rows they are after, and removes two that nothing reads any
more."""

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None

INDEXES = (
    ("ix_unheard_attempt_to_move", "unheard_attempt", ["replaced_by"], "replaced_by IS NOT NULL AND is_moved = false"),
    ("ix_idempotent_reply_running", "idempotent_reply", ["slot", "created_at"], "state = 'running'"),
    ("ix_idempotent_reply_stored", "idempotent_reply", ["batch_id", "expires_at"], "state = 'stored'"),
)


def upgrade() -> None:
    for name, table, columns, where in INDEXES:
        op.create_index(name, table, columns, sqlite_where=sa.text(where), postgresql_where=sa.text(where))
    op.drop_index("ix_idempotent_reply_expires_at", "idempotent_reply")
    op.drop_index("ix_budget_alert_unsent", "budget_alert")
