"""The first tables, the triggers that keep the books append-only, and the rows every database begins with."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

from accounting.database.append_only import refuse_edits

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

JSON_TEXT = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")


def upgrade() -> None:
    op.create_table(
        "audit_log",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("event", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=True),
        sa.Column("object_id", sa.Text(), nullable=True),
        sa.Column("detail", JSON_TEXT, nullable=False),
    )
    op.create_table(
        "auth_epoch",
        sa.Column("id", sa.Integer(), autoincrement=False, primary_key=True),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "batch_charge",
        sa.Column("batch_id", sa.Text(), primary_key=True),
        sa.Column("line_no", sa.BigInteger(), autoincrement=False, primary_key=True),
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.UniqueConstraint("request_id", name=op.f("uq_batch_charge_request_id")),
    )
    op.create_table(
        "engine_record",
        sa.Column("request_id", sa.Text(), primary_key=True),
        sa.Column("attempt", sa.BigInteger(), autoincrement=False, primary_key=True),
        sa.Column("worker", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("root", sa.Text(), nullable=False),
        sa.Column("posted_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("cache_read", sa.BigInteger(), nullable=False),
        sa.Column("cache_write", sa.BigInteger(), nullable=False),
        sa.Column("uncached", sa.BigInteger(), nullable=False),
        sa.Column("output", sa.BigInteger(), nullable=False),
        sa.Column("speculated", sa.BigInteger(), nullable=False),
        sa.Column("recomputed", sa.BigInteger(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
    )
    op.create_index(op.f("ix_engine_record_tenant_id"), "engine_record", ["tenant_id"])
    op.create_table(
        "journal_offset",
        sa.Column("slot", sa.BigInteger(), autoincrement=False, primary_key=True),
        sa.Column("offset", sa.BigInteger(), nullable=False),
        sa.Column("posted_at_ms", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "ledger_entry",
        sa.Column("request_id", sa.Text(), primary_key=True),
        sa.Column("kind", sa.Text(), primary_key=True),
        sa.Column("attempt", sa.BigInteger(), autoincrement=False, primary_key=True),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("root", sa.Text(), nullable=False),
        sa.Column("tier", sa.Text(), nullable=False),
        sa.Column("price_version", sa.Text(), nullable=False),
        sa.Column("currency", sa.Text(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("write_off", sa.Text(), nullable=False),
        sa.Column("opened_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("ended_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("posted_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("cache_read", sa.BigInteger(), nullable=False),
        sa.Column("cache_write", sa.BigInteger(), nullable=False),
        sa.Column("uncached", sa.BigInteger(), nullable=False),
        sa.Column("output", sa.BigInteger(), nullable=False),
        sa.Column("speculated", sa.BigInteger(), nullable=False),
        sa.Column("recomputed", sa.BigInteger(), nullable=False),
        sa.Column("charge", sa.BigInteger(), nullable=False),
        sa.Column("charge_cache_read", sa.BigInteger(), nullable=False),
        sa.Column("charge_cache_write", sa.BigInteger(), nullable=False),
        sa.Column("charge_uncached", sa.BigInteger(), nullable=False),
        sa.Column("charge_output", sa.BigInteger(), nullable=False),
        sa.Column("reserved", sa.BigInteger(), nullable=False),
        sa.Column("trace_id", sa.Text(), nullable=False),
        sa.Column("batch_id", sa.Text(), nullable=True),
        sa.Column("line_no", sa.BigInteger(), nullable=True),
    )
    op.create_index("ix_ledger_entry_tenant_id_opened_at_ms", "ledger_entry", ["tenant_id", "opened_at_ms"])
    op.create_index(
        "uq_ledger_entry_ending",
        "ledger_entry",
        ["request_id"],
        unique=True,
        sqlite_where=sa.text("kind IN ('settle', 'void')"),
        postgresql_where=sa.text("kind IN ('settle', 'void')"),
    )
    op.create_table(
        "price_sheet",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("currency", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
    )
    for table in ("rollup_day", "rollup_hour", "rollup_minute"):
        op.create_table(
            table,
            sa.Column("bucket", sa.BigInteger(), autoincrement=False, primary_key=True),
            sa.Column("tenant_id", sa.Text(), primary_key=True),
            sa.Column("key_id", sa.Text(), primary_key=True),
            sa.Column("model", sa.Text(), primary_key=True),
            sa.Column("tier", sa.Text(), primary_key=True),
            sa.Column("price_version", sa.Text(), primary_key=True),
            sa.Column("currency", sa.Text(), primary_key=True),
            sa.Column("num_requests", sa.BigInteger(), nullable=False),
            sa.Column("cache_read", sa.BigInteger(), nullable=False),
            sa.Column("cache_write", sa.BigInteger(), nullable=False),
            sa.Column("uncached", sa.BigInteger(), nullable=False),
            sa.Column("output", sa.BigInteger(), nullable=False),
            sa.Column("charge", sa.BigInteger(), nullable=False),
            sa.Column("charge_cache_read", sa.BigInteger(), nullable=False),
            sa.Column("charge_cache_write", sa.BigInteger(), nullable=False),
            sa.Column("charge_uncached", sa.BigInteger(), nullable=False),
            sa.Column("charge_output", sa.BigInteger(), nullable=False),
        )
    op.create_table(
        "tenant",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), server_default="active", nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("archived_at", sa.BigInteger(), nullable=True),
        sa.Column("version", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("weight_percent", sa.BigInteger(), server_default="100", nullable=False),
        sa.Column("requests_per_minute", sa.BigInteger(), nullable=True),
        sa.Column("tokens_per_minute", sa.BigInteger(), nullable=True),
        sa.Column("concurrency", sa.BigInteger(), nullable=True),
        sa.CheckConstraint("status IN ('active', 'suspended', 'archived')", name=op.f("ck_tenant_status")),
    )
    op.create_table(
        "file",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("tenant_id", sa.Text(), sa.ForeignKey("tenant.id"), nullable=False),
        sa.Column("purpose", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("storage_key", sa.Text(), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=True),
        sa.Column("deleted_at", sa.BigInteger(), nullable=True),
    )
    op.create_index("ix_file_tenant_id_created_at", "file", ["tenant_id", "created_at"])
    op.create_table(
        "ledger_leg",
        sa.Column("request_id", sa.Text(), primary_key=True),
        sa.Column("kind", sa.Text(), primary_key=True),
        sa.Column("attempt", sa.BigInteger(), autoincrement=False, primary_key=True),
        sa.Column("account", sa.Text(), primary_key=True),
        sa.Column("unit", sa.Text(), primary_key=True),
        sa.Column("token_class", sa.Text(), primary_key=True),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["request_id", "kind", "attempt"],
            ["ledger_entry.request_id", "ledger_entry.kind", "ledger_entry.attempt"],
            name=op.f("fk_ledger_leg_request_id_kind_attempt_ledger_entry"),
        ),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "model_limit",
        sa.Column("tenant_id", sa.Text(), sa.ForeignKey("tenant.id"), primary_key=True),
        sa.Column("model", sa.Text(), primary_key=True),
        sa.Column("requests_per_minute", sa.BigInteger(), nullable=True),
        sa.Column("tokens_per_minute", sa.BigInteger(), nullable=True),
        sa.Column("concurrency", sa.BigInteger(), nullable=True),
        sa.Column("batch_backlog_tokens", sa.BigInteger(), nullable=True),
    )
    op.create_table(
        "price_assignment",
        sa.Column("tenant_id", sa.Text(), sa.ForeignKey("tenant.id"), primary_key=True),
        sa.Column("from_ms", sa.BigInteger(), autoincrement=False, primary_key=True),
        sa.Column("until_ms", sa.BigInteger(), nullable=True),
        sa.Column("sheet_id", sa.Text(), sa.ForeignKey("price_sheet.id"), nullable=False),
        sa.CheckConstraint("until_ms IS NULL OR until_ms > from_ms", name=op.f("ck_price_assignment_interval")),
    )
    op.create_index(
        "uq_price_assignment_open",
        "price_assignment",
        ["tenant_id"],
        unique=True,
        sqlite_where=sa.text("until_ms IS NULL"),
        postgresql_where=sa.text("until_ms IS NULL"),
    )
    op.create_table(
        "price_sheet_version",
        sa.Column("sheet_id", sa.Text(), sa.ForeignKey("price_sheet.id"), primary_key=True),
        sa.Column("version", sa.BigInteger(), autoincrement=False, primary_key=True),
        sa.Column("from_ms", sa.BigInteger(), nullable=False),
        sa.Column("until_ms", sa.BigInteger(), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("until_ms IS NULL OR until_ms > from_ms", name=op.f("ck_price_sheet_version_interval")),
        sa.UniqueConstraint("sheet_id", "from_ms", name=op.f("uq_price_sheet_version_sheet_id_from_ms")),
    )
    op.create_index(
        "uq_price_sheet_version_open",
        "price_sheet_version",
        ["sheet_id"],
        unique=True,
        sqlite_where=sa.text("until_ms IS NULL"),
        postgresql_where=sa.text("until_ms IS NULL"),
    )
    op.create_table(
        "service_account",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("tenant_id", sa.Text(), sa.ForeignKey("tenant.id"), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("role", sa.Text(), server_default="member", nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("deleted_at", sa.BigInteger(), nullable=True),
    )
    op.create_index(op.f("ix_service_account_tenant_id"), "service_account", ["tenant_id"])
    op.create_table(
        "data_key",
        sa.Column("tenant_id", sa.Text(), sa.ForeignKey("tenant.id"), primary_key=True),
        sa.Column("wrapped", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "idempotent_reply",
        sa.Column("tenant_id", sa.Text(), sa.ForeignKey("tenant.id"), primary_key=True),
        sa.Column("key", sa.Text(), primary_key=True),
        sa.Column("fingerprint", sa.LargeBinary(), nullable=False),
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("slot", sa.BigInteger(), nullable=False),
        sa.Column("batch_id", sa.Text(), nullable=True),
        sa.Column("line_no", sa.BigInteger(), nullable=True),
        sa.Column("state", sa.Text(), server_default="running", nullable=False),
        sa.Column("status", sa.BigInteger(), nullable=True),
        sa.Column("body", sa.LargeBinary(), nullable=True),
        sa.Column("posting", sa.LargeBinary(), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("state IN ('running', 'stored')", name=op.f("ck_idempotent_reply_state")),
        sa.UniqueConstraint("request_id", name=op.f("uq_idempotent_reply_request_id")),
    )
    op.create_index(op.f("ix_idempotent_reply_batch_id"), "idempotent_reply", ["batch_id"])
    op.create_index(op.f("ix_idempotent_reply_expires_at"), "idempotent_reply", ["expires_at"])
    op.create_table(
        "tenant_turn",
        sa.Column("tenant_id", sa.Text(), sa.ForeignKey("tenant.id"), primary_key=True),
        sa.Column("deficit_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("last_visit", sa.BigInteger(), server_default="0", nullable=False),
    )
    op.create_table(
        "api_key",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("public_id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), sa.ForeignKey("tenant.id"), nullable=False),
        sa.Column("service_account_id", sa.Text(), sa.ForeignKey("service_account.id"), nullable=True),
        sa.Column("name", sa.Text(), nullable=True),
        sa.Column("hash", sa.LargeBinary(), nullable=False),
        sa.Column("pepper_version", sa.BigInteger(), server_default="1", nullable=False),
        sa.Column("scopes", JSON_TEXT, nullable=False),
        sa.Column("models", JSON_TEXT, nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=True),
        sa.Column("last_used_at", sa.BigInteger(), nullable=True),
        sa.Column("revoked_at", sa.BigInteger(), nullable=True),
        sa.Column("version", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("requests_per_minute", sa.BigInteger(), nullable=True),
        sa.Column("tokens_per_minute", sa.BigInteger(), nullable=True),
        sa.Column("concurrency", sa.BigInteger(), nullable=True),
        sa.CheckConstraint("kind IN ('live', 'test', 'admin')", name=op.f("ck_api_key_kind")),
        sa.UniqueConstraint("hash", name=op.f("uq_api_key_hash")),
        sa.UniqueConstraint("public_id", name=op.f("uq_api_key_public_id")),
    )
    op.create_index(op.f("ix_api_key_service_account_id"), "api_key", ["service_account_id"])
    op.create_index(op.f("ix_api_key_tenant_id"), "api_key", ["tenant_id"])
    op.create_table(
        "price_rate",
        sa.Column("sheet_id", sa.Text(), primary_key=True),
        sa.Column("version", sa.BigInteger(), autoincrement=False, primary_key=True),
        sa.Column("model", sa.Text(), primary_key=True),
        sa.Column("tier", sa.Text(), primary_key=True),
        sa.Column("cache_read", sa.BigInteger(), nullable=False),
        sa.Column("cache_write", sa.BigInteger(), nullable=False),
        sa.Column("uncached", sa.BigInteger(), nullable=False),
        sa.Column("output", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("tier IN ('interactive', 'batch')", name=op.f("ck_price_rate_tier")),
        sa.CheckConstraint("cache_read >= 0 AND cache_read <= 1000000000000", name=op.f("ck_price_rate_cache_read")),
        sa.CheckConstraint("cache_write >= 0 AND cache_write <= 1000000000000", name=op.f("ck_price_rate_cache_write")),
        sa.CheckConstraint("output >= 0 AND output <= 1000000000000", name=op.f("ck_price_rate_output")),
        sa.CheckConstraint("uncached >= 0 AND uncached <= 1000000000000", name=op.f("ck_price_rate_uncached")),
        sa.ForeignKeyConstraint(
            ["sheet_id", "version"],
            ["price_sheet_version.sheet_id", "price_sheet_version.version"],
            name=op.f("fk_price_rate_sheet_id_version_price_sheet_version"),
        ),
    )
    op.create_table(
        "batch",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("tenant_id", sa.Text(), sa.ForeignKey("tenant.id"), nullable=False),
        sa.Column("key_id", sa.Text(), sa.ForeignKey("api_key.id"), nullable=False),
        sa.Column("endpoint", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=True),
        sa.Column("completion_window", sa.Text(), nullable=False),
        sa.Column("input_file_id", sa.Text(), sa.ForeignKey("file.id"), nullable=False),
        sa.Column("output_file_id", sa.Text(), sa.ForeignKey("file.id"), nullable=True),
        sa.Column("error_file_id", sa.Text(), sa.ForeignKey("file.id"), nullable=True),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.Column("in_progress_at", sa.BigInteger(), nullable=True),
        sa.Column("finalizing_at", sa.BigInteger(), nullable=True),
        sa.Column("completed_at", sa.BigInteger(), nullable=True),
        sa.Column("failed_at", sa.BigInteger(), nullable=True),
        sa.Column("expired_at", sa.BigInteger(), nullable=True),
        sa.Column("cancelling_at", sa.BigInteger(), nullable=True),
        sa.Column("cancelled_at", sa.BigInteger(), nullable=True),
        sa.Column("paused_reason", sa.Text(), nullable=True),
        sa.Column("invalid_lines", sa.Text(), server_default="reject", nullable=False),
        sa.Column("output_expires_after_s", sa.BigInteger(), nullable=True),
        sa.Column("num_total", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("num_completed", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("num_failed", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("cache_read", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("cache_write", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("uncached", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("output", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("num_invalid", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("errors", JSON_TEXT, nullable=True),
        sa.Column("fence", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("claimed_until_ms", sa.BigInteger(), nullable=True),
        sa.Column("metadata", JSON_TEXT, nullable=True),
        sa.Column("traceparent", sa.Text(), server_default="", nullable=False),
        sa.CheckConstraint(
            "state IN ('validating', 'failed', 'in_progress', 'finalizing', 'completed', 'expired', 'cancelling', 'cancelled')",
            name=op.f("ck_batch_state"),
        ),
    )
    op.create_index("ix_batch_state_expires_at", "batch", ["state", "expires_at"])
    op.create_index("ix_batch_tenant_id_created_at", "batch", ["tenant_id", "created_at"])
    op.create_table(
        "batch_chunk",
        sa.Column("batch_id", sa.Text(), sa.ForeignKey("batch.id"), primary_key=True),
        sa.Column("seq", sa.BigInteger(), autoincrement=False, primary_key=True),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), server_default="queued", nullable=False),
        sa.Column("claimed_by", sa.Text(), nullable=True),
        sa.Column("claimed_until_ms", sa.BigInteger(), nullable=True),
        sa.Column("fence", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("not_before_ms", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("predicted_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_lines", sa.BigInteger(), nullable=False),
        sa.Column("lines", sa.LargeBinary(), nullable=False),
        sa.CheckConstraint("state IN ('queued', 'claimed', 'done')", name=op.f("ck_batch_chunk_state")),
    )
    op.create_index("ix_batch_chunk_state_tenant_id", "batch_chunk", ["state", "tenant_id"])
    op.create_table(
        "batch_line",
        sa.Column("batch_id", sa.Text(), sa.ForeignKey("batch.id"), primary_key=True),
        sa.Column("line_no", sa.BigInteger(), autoincrement=False, primary_key=True),
        sa.Column("chunk_seq", sa.BigInteger(), nullable=True),
        sa.Column("custom_id", sa.Text(), nullable=True),
        sa.Column("state", sa.Text(), server_default="started", nullable=False),
        sa.Column("failures", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("crashes", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("request_id", sa.Text(), nullable=True),
        sa.Column("status", sa.BigInteger(), nullable=True),
        sa.Column("body", sa.LargeBinary(), nullable=True),
        sa.Column("error", JSON_TEXT, nullable=True),
        sa.Column("cache_read", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("cache_write", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("uncached", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("output", sa.BigInteger(), server_default="0", nullable=False),
        sa.CheckConstraint(
            "state IN ('started', 'succeeded', 'errored', 'cancelled', 'expired')", name=op.f("ck_batch_line_state")
        ),
    )
    _make_immutable()
    _first_rows()


APPEND_ONLY = ("ledger_entry", "ledger_leg", "engine_record", "batch_charge", "audit_log", "price_rate")

# A price version is immutable but for its end, which its successor sets once.
CLOSES_ITS_INTERVAL = (
    "OLD.until_ms IS NULL AND NEW.until_ms IS NOT NULL AND NEW.sheet_id = OLD.sheet_id"
    " AND NEW.version = OLD.version AND NEW.from_ms = OLD.from_ms AND NEW.created_at = OLD.created_at"
)


def _make_immutable() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute(
            "CREATE FUNCTION headgate_append_only() RETURNS trigger LANGUAGE plpgsql AS $$ "
            "BEGIN RAISE EXCEPTION '% is append-only', TG_TABLE_NAME USING ERRCODE = 'restrict_violation'; END $$"
        )
    for table in APPEND_ONLY:
        refuse_edits(table)
    refuse_edits("price_sheet_version", CLOSES_ITS_INTERVAL)


def _first_rows() -> None:
    op.execute("INSERT INTO auth_epoch (id, epoch) VALUES (1, 1)")
    # Warm-up and public prefixes belong to this tenant, and so do the operator's own keys.
    op.execute("INSERT INTO tenant (id, name, created_at) VALUES ('operator', 'Operator', 0)")
