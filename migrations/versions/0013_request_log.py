"""The request log: a row per request of a known key."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

COLUMNS = ("tenant_id", "key_id", "model")


def upgrade() -> None:
    byte_order = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
    json = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")
    op.create_table(
        "request_log",
        sa.Column("request_id", byte_order, primary_key=True),
        sa.Column("is_tail", sa.Boolean(), nullable=False),
        sa.Column("started_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("endpoint", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("tier", sa.Text(), nullable=False),
        sa.Column("batch_id", sa.Text(), nullable=True),
        sa.Column("end_user", sa.Text(), nullable=False),
        sa.Column("metadata", json, nullable=True),
        sa.Column("is_stream", sa.Boolean(), nullable=False),
        sa.Column("status", sa.BigInteger(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("error_code", sa.Text(), nullable=False),
        sa.Column("finish_reason", sa.Text(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cache_write_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("charge", sa.BigInteger(), nullable=False),
        sa.Column("currency", sa.Text(), nullable=False),
        sa.Column("ttft_ms", sa.BigInteger(), nullable=True),
        sa.Column("duration_ms", sa.BigInteger(), nullable=False),
        sa.Column("num_retries", sa.BigInteger(), nullable=False),
        sa.Column("worker", sa.Text(), nullable=False),
        sa.Column("miss_reason", sa.Text(), nullable=False),
        sa.Column("diverged_at_token", sa.BigInteger(), nullable=True),
        sa.Column("trace_id", sa.Text(), nullable=False),
        sa.Column("timeline", sa.Text(), nullable=False),
    )
    op.create_index("ix_request_log_is_tail", "request_log", ["is_tail", "request_id"])
    for column in COLUMNS:
        op.create_index(f"ix_request_log_{column}", "request_log", [column, "is_tail", "request_id"])
    op.create_index("ix_request_log_trace_id", "request_log", ["trace_id", "request_id"])
