"""Month sums, day seals, invoices, credits, rates of residency; price intervals that cannot overlap."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

from accounting.database.append_only import refuse_edits

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

JSON_LIST = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")


def upgrade() -> None:
    op.create_table(
        "day_seal",
        sa.Column("day", sa.BigInteger(), autoincrement=False, primary_key=True),
        sa.Column("num_entries", sa.BigInteger(), nullable=False),
        sa.Column("hash", sa.LargeBinary(), nullable=False),
        sa.Column("sealed_at_ms", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "rollup_month",
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
        "credit",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), sa.ForeignKey("tenant.id"), nullable=False),
        sa.Column("currency", sa.Text(), nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.Column("source", sa.Text(), nullable=True),
        sa.Column("priority", sa.BigInteger(), nullable=False),
        sa.Column("starts_at", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=True),
        sa.Column("corrects_request_id", sa.Text(), nullable=True),
        sa.Column("note", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("idempotency_key", sa.Text(), nullable=False),
        sa.Column("fingerprint", sa.LargeBinary(), nullable=False),
        sa.CheckConstraint("(type = 'grant') = (corrects_request_id IS NULL)", name=op.f("ck_credit_corrects")),
        sa.CheckConstraint("type IN ('grant', 'credit_note', 'adjustment')", name=op.f("ck_credit_type")),
        sa.CheckConstraint("amount > 0", name=op.f("ck_credit_amount")),
        sa.UniqueConstraint("idempotency_key", name=op.f("uq_credit_idempotency_key")),
    )
    op.create_index("ix_credit_corrects_request_id", "credit", ["corrects_request_id"])
    op.create_index(op.f("ix_credit_tenant_id"), "credit", ["tenant_id"])
    op.create_table(
        "invoice",
        sa.Column("number", sa.Text(), primary_key=True),
        sa.Column("issuer", sa.Text(), nullable=False),
        sa.Column("series", sa.Text(), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("tenant_id", sa.Text(), sa.ForeignKey("tenant.id"), nullable=False),
        sa.Column("tenant_name", sa.Text(), nullable=False),
        sa.Column("period", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("currency", sa.Text(), nullable=False),
        sa.Column("from_ms", sa.BigInteger(), nullable=False),
        sa.Column("until_ms", sa.BigInteger(), nullable=False),
        sa.Column("cutoff_ms", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("num_requests", sa.BigInteger(), nullable=False),
        sa.Column("subtotal", sa.BigInteger(), nullable=False),
        sa.Column("prepaid", sa.BigInteger(), nullable=False),
        sa.Column("total", sa.BigInteger(), nullable=False),
        sa.Column("days", JSON_LIST, nullable=False),
        sa.CheckConstraint("series IN ('INV', 'CN')", name=op.f("ck_invoice_series")),
        sa.CheckConstraint("total = subtotal - prepaid", name=op.f("ck_invoice_total")),
        sa.UniqueConstraint("series", "sequence", name=op.f("uq_invoice_series_sequence")),
        sa.UniqueConstraint(
            "tenant_id", "period", "series", "version", name=op.f("uq_invoice_tenant_id_period_series_version")
        ),
    )
    op.create_table(
        "credit_use",
        sa.Column("credit_id", sa.Text(), sa.ForeignKey("credit.id"), primary_key=True),
        sa.Column("use_no", sa.BigInteger(), autoincrement=False, primary_key=True),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.Column("number", sa.Text(), sa.ForeignKey("invoice.number"), nullable=False),
        sa.CheckConstraint("kind IN ('grant_use', 'grant_expiry')", name=op.f("ck_credit_use_kind")),
        sa.CheckConstraint("amount > 0", name=op.f("ck_credit_use_amount")),
    )
    op.create_index(op.f("ix_credit_use_number"), "credit_use", ["number"])
    op.create_table(
        "invoice_line",
        sa.Column("number", sa.Text(), sa.ForeignKey("invoice.number"), primary_key=True),
        sa.Column("line_no", sa.BigInteger(), autoincrement=False, primary_key=True),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("period", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("tier", sa.Text(), nullable=False),
        sa.Column("token_class", sa.Text(), nullable=False),
        sa.Column("price_version", sa.Text(), nullable=False),
        sa.Column("rate", sa.BigInteger(), nullable=False),
        sa.Column("num_requests", sa.BigInteger(), nullable=False),
        sa.Column("quantity", sa.BigInteger(), nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.Column("credit_id", sa.Text(), sa.ForeignKey("credit.id"), nullable=True),
        sa.Column("note", sa.Text(), nullable=False),
        sa.CheckConstraint(
            "kind IN ('usage', 'adjustment', 'credit_note', 'prepaid')", name=op.f("ck_invoice_line_kind")
        ),
    )
    op.create_index(op.f("ix_invoice_line_credit_id"), "invoice_line", ["credit_id"])
    op.create_table(
        "price_residency",
        sa.Column("sheet_id", sa.Text(), primary_key=True),
        sa.Column("version", sa.BigInteger(), autoincrement=False, primary_key=True),
        sa.Column("model", sa.Text(), primary_key=True),
        sa.Column("cache", sa.BigInteger(), nullable=False),
        sa.Column("pinned", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("cache >= 0 AND cache <= 1000000000000", name=op.f("ck_price_residency_cache")),
        sa.CheckConstraint("pinned >= 0 AND pinned <= 1000000000000", name=op.f("ck_price_residency_pinned")),
        sa.ForeignKeyConstraint(
            ["sheet_id", "version"],
            ["price_sheet_version.sheet_id", "price_sheet_version.version"],
            name=op.f("fk_price_residency_sheet_id_version_price_sheet_version"),
        ),
    )
    op.create_index("ix_engine_record_posted_at_ms", "engine_record", ["posted_at_ms"], postgresql_using="brin")
    op.create_index("ix_ledger_entry_opened_at_ms", "ledger_entry", ["opened_at_ms"], postgresql_using="brin")
    op.create_index("ix_ledger_entry_posted_at_ms", "ledger_entry", ["posted_at_ms"], postgresql_using="brin")
    _fill_months()
    _make_immutable()
    _refuse_overlaps()


APPEND_ONLY = ("day_seal", "invoice", "invoice_line", "credit", "credit_use", "price_residency", "price_sheet")

# An assignment is immutable but for its end, which its successor sets once.
ENDS_ITS_INTERVAL = (
    "OLD.until_ms IS NULL AND NEW.until_ms IS NOT NULL AND NEW.tenant_id = OLD.tenant_id"
    " AND NEW.from_ms = OLD.from_ms AND NEW.sheet_id = OLD.sheet_id"
)

# Table → the row that writers of one group of intervals queue at, and the group's column.
INTERVALS = {"price_assignment": ("tenant", "tenant_id"), "price_sheet_version": ("price_sheet", "sheet_id")}
FOR_EVER = 2**62


def _is_postgresql() -> bool:
    return op.get_bind().dialect.name == "postgresql"


def _fill_months() -> None:
    """Fills the months from the days there are; a bucket is its first second."""
    month = (
        "CAST(extract(epoch FROM date_trunc('month', to_timestamp(bucket) AT TIME ZONE 'UTC')) AS BIGINT)"
        if _is_postgresql()
        else "CAST(strftime('%s', bucket, 'unixepoch', 'start of month') AS INTEGER)"
    )
    keys = "tenant_id, key_id, model, tier, price_version, currency"
    names = (
        "num_requests",
        "cache_read",
        "cache_write",
        "uncached",
        "output",
        "charge",
        "charge_cache_read",
        "charge_cache_write",
        "charge_uncached",
        "charge_output",
    )
    sums = ", ".join(f"SUM({name})" for name in names)
    op.execute(
        f"INSERT INTO rollup_month (bucket, {keys}, {', '.join(names)}) "  # noqa: S608 - fixed names
        f"SELECT {month}, {keys}, {sums} FROM rollup_day GROUP BY {month}, {keys}"
    )


def _make_immutable() -> None:
    for table in APPEND_ONLY:
        refuse_edits(table)
    refuse_edits("price_assignment", ENDS_ITS_INTERVAL)


def _refuse_overlaps() -> None:
    for table, (parent, column) in INTERVALS.items():
        # Only an insert can overlap: an update may do no more than set the end.
        overlap = (
            f"SELECT 1 FROM {table} AS o WHERE o.{column} = NEW.{column} "  # noqa: S608 - fixed names
            f"AND o.from_ms < COALESCE(NEW.until_ms, {FOR_EVER}) AND NEW.from_ms < COALESCE(o.until_ms, {FOR_EVER})"
        )
        trigger = f"CREATE TRIGGER {table}_no_overlap BEFORE INSERT ON {table} FOR EACH ROW"
        if not _is_postgresql():
            op.execute(
                f"{trigger} WHEN EXISTS ({overlap}) BEGIN SELECT RAISE(ABORT, '{table}: intervals overlap'); END"
            )
            continue
        op.execute(
            f"CREATE FUNCTION headgate_{table}_no_overlap() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            f"PERFORM 1 FROM {parent} WHERE id = NEW.{column} FOR NO KEY UPDATE; "
            f"IF EXISTS ({overlap}) THEN RAISE EXCEPTION '{table}: intervals overlap' "
            "USING ERRCODE = 'exclusion_violation'; END IF; RETURN NEW; END $$"
        )
        op.execute(f"{trigger} EXECUTE FUNCTION headgate_{table}_no_overlap()")
