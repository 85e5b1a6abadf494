"""Profiles of who bills and who is billed, terms and payments of documents. Documents so far get terms that ask for
exactly what they asked for."""

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

from accounting.database.append_only import refuse_edits

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

JSON = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")
APPEND_ONLY = ("invoice_terms", "invoice_payment", "logo")
ROWS_AT_ONCE = 500


def upgrade() -> None:
    op.create_table(
        "billing_profile",
        sa.Column("owner", sa.Text(), primary_key=True),
        sa.Column("profile", JSON, nullable=False),
        sa.Column("changed_at", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "logo", sa.Column("hash", sa.Text(), primary_key=True), sa.Column("content", sa.LargeBinary(), nullable=False)
    )
    _create_terms()
    op.create_table(
        "invoice_payment",
        sa.Column("number", sa.Text(), sa.ForeignKey("invoice.number"), primary_key=True),
        sa.Column("payment_no", sa.BigInteger(), autoincrement=False, primary_key=True),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.Column("paid_at", sa.BigInteger(), nullable=False),
        sa.Column("reference", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.CheckConstraint("amount > 0", name=op.f("ck_invoice_payment_amount")),
    )
    _give_terms_to_known_documents()
    for table in APPEND_ONLY:
        refuse_edits(table)


def _create_terms() -> None:
    texts = ("issuer", "customer")
    numbers = ("decimals", "discount", "net", "tax_amount", "paid", "due", "carried_in", "carried_out")
    op.create_table(
        "invoice_terms",
        sa.Column("number", sa.Text(), sa.ForeignKey("invoice.number"), primary_key=True),
        sa.Column("prefix", sa.Text(), nullable=False),
        sa.Column("place", sa.BigInteger(), nullable=False),
        *(sa.Column(name, JSON, nullable=False) for name in texts),
        sa.Column("tax", sa.Text(), nullable=False),
        sa.Column("tax_rate", sa.BigInteger(), nullable=False),
        sa.Column("tax_reason", sa.Text(), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in (*numbers, "settled_before", "due_at")),
        sa.Column("refers_to", sa.Text(), sa.ForeignKey("invoice.number"), nullable=True),
        sa.Column("voids", sa.Boolean(), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.CheckConstraint("due = net + tax_amount - paid", name=op.f("ck_invoice_terms_due")),
        sa.UniqueConstraint("prefix", "place", name=op.f("uq_invoice_terms_prefix_place")),
    )
    op.create_index(op.f("ix_invoice_terms_refers_to"), "invoice_terms", ["refers_to"])


def _give_terms_to_known_documents() -> None:
    conn = op.get_bind()
    names = ("number", "series", "sequence", "issuer", "tenant_name", "subtotal", "prepaid", "total", "created_at")
    invoice = sa.table("invoice", *(sa.column(name) for name in names))
    columns = (sa.column(name, JSON) if name in ("issuer", "customer") else sa.column(name) for name in _TERMS)
    terms = sa.table("invoice_terms", *columns)
    known = conn.execute(sa.select(invoice)).all()
    for start in range(0, len(known), ROWS_AT_ONCE):
        conn.execute(sa.insert(terms), [_terms_of(row) for row in known[start : start + ROWS_AT_ONCE]])


_TERMS = (
    *("number", "prefix", "place", "issuer", "customer", "tax", "tax_rate", "tax_reason", "decimals", "discount"),
    *("net", "tax_amount", "paid", "due", "carried_in", "carried_out", "settled_before", "due_at"),
    *("refers_to", "voids", "note"),
)


def _terms_of(row: Any) -> dict[str, Any]:
    zero = ("tax_rate", "discount", "tax_amount", "carried_in", "carried_out", "settled_before")
    return {
        "number": row.number,
        "prefix": f"{row.series}-",
        "place": row.sequence,
        "issuer": {"name": row.issuer},
        "customer": {"name": row.tenant_name},
        "tax": "not_subject",
        "decimals": 6,
        "net": row.subtotal,
        "paid": row.prepaid,
        "due": row.total,
        "due_at": row.created_at,
        "refers_to": None,
        "voids": False,
        **dict.fromkeys(("tax_reason", "note"), ""),
        **dict.fromkeys(zero, 0),
    }
