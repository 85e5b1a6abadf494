"""Sessions in the request log: the conversation that a request belongs to."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

INDEX = "ix_request_log_session_id"
HAS_SESSION = sa.text("session_id <> ''")


def upgrade() -> None:
    op.add_column("request_log", sa.Column("session_id", sa.Text(), server_default="", nullable=False))
    op.create_index(
        INDEX,
        "request_log",
        ["tenant_id", "session_id", "request_id"],
        sqlite_where=HAS_SESSION,
        postgresql_where=HAS_SESSION,
    )
