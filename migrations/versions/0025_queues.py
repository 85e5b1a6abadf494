"""This revision adds indexes, so that the next chunk of a tenant, its open batches and the bytes of its files are found
without reading others; and it notes with each delivery whether its webhook is a tenant's own."""

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None

OPEN = "state IN ('validating', 'in_progress', 'finalizing', 'cancelling')"
INDEXES = (
    ("ix_file_room", "file", ["tenant_id", "num_bytes"], "storage_key IS NOT NULL"),
    ("ix_batch_open", "batch", ["tenant_id"], OPEN),
    ("ix_batch_chunk_queued", "batch_chunk", ["batch_id", "not_before_ms", "seq"], "state = 'queued'"),
)


def upgrade() -> None:
    for name, table, columns, where in INDEXES:
        op.create_index(name, table, columns, sqlite_where=sa.text(where), postgresql_where=sa.text(where))
    op.drop_index("ix_outbox_due", "outbox")
    op.add_column("outbox", sa.Column("is_tenants", sa.Boolean(), server_default=sa.false(), nullable=False))
    op.execute(
        "UPDATE outbox SET is_tenants = true"
        " WHERE ended_at_ms IS NULL AND webhook_id IN (SELECT id FROM webhook WHERE is_tenants)"
    )
    waits = sa.text("ended_at_ms IS NULL")
    op.create_index(
        "ix_outbox_due",
        "outbox",
        ["lane", "is_tenants", "deliver_after_ms"],
        sqlite_where=waits,
        postgresql_where=waits,
    )
