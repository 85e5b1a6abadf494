"""Idempotency keys of tenants, attempts that nobody heard, quotes."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

ROOM = "ix_idempotent_reply_room"


def upgrade() -> None:
    op.add_column("idempotent_reply", sa.Column("content_type", sa.Text(), nullable=True))
    op.add_column("idempotent_reply", sa.Column("num_bytes", sa.BigInteger(), server_default="0", nullable=False))
    op.create_index(
        ROOM,
        "idempotent_reply",
        ["tenant_id", "expires_at", "num_bytes"],
        sqlite_where=sa.text("batch_id IS NULL"),
        postgresql_where=sa.text("batch_id IS NULL"),
    )
    op.create_table(
        "idempotent_posting",
        sa.Column("request_id", sa.Text(), primary_key=True),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("posting", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id", "key"],
            ["idempotent_reply.tenant_id", "idempotent_reply.key"],
            name=op.f("fk_idempotent_posting_tenant_id_key_idempotent_reply"),
            ondelete="CASCADE",
        ),
    )
    op.create_index("ix_idempotent_posting_tenant_id_key", "idempotent_posting", ["tenant_id", "key"])
    _create_unheard_attempt()
    _create_quote()


def _create_unheard_attempt() -> None:
    op.create_table(
        "unheard_attempt",
        sa.Column("request_id", sa.Text(), primary_key=True),
        sa.Column("attempt_id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), sa.ForeignKey("tenant.id"), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("fingerprint", sa.LargeBinary(), nullable=False),
        sa.Column("ended_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("replaced_by", sa.Text(), nullable=True),
        sa.Column("is_moved", sa.Boolean(), server_default=sa.false(), nullable=False),
    )
    op.create_index(op.f("ix_unheard_attempt_ended_at_ms"), "unheard_attempt", ["ended_at_ms"])
    op.create_index("ix_unheard_attempt_key_id_fingerprint", "unheard_attempt", ["key_id", "fingerprint"])


def _create_quote() -> None:
    op.create_table(
        "quote",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("tenant_id", sa.Text(), sa.ForeignKey("tenant.id"), nullable=False),
        sa.Column("fingerprint", sa.LargeBinary(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("price_version", sa.Text(), nullable=False),
        sa.Column("currency", sa.Text(), nullable=False),
        sa.Column("max_output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("max_charge", sa.BigInteger(), nullable=False),
        sa.Column("expires_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("used_by", sa.Text(), nullable=True),
    )
    op.create_index(op.f("ix_quote_expires_at_ms"), "quote", ["expires_at_ms"])
