"""This revision adds indexes of the request log, so that the requests of a batch and those of an end user are found at once."""

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name, columns, condition in (
        ("end_user", ["tenant_id", "end_user", "request_id"], "end_user <> ''"),
        ("batch_id", ["batch_id", "request_id"], "batch_id IS NOT NULL"),
    ):
        where = sa.text(condition)
        op.create_index(f"ix_request_log_{name}", "request_log", columns, sqlite_where=where, postgresql_where=where)
