"""The tables of answers made by several engine requests, of repeated attempts and of quotes. The rules of models.py
apply.

Rows of these tables are edited and deleted. Costs are in the ledger.
"""

from __future__ import annotations

from sqlalchemy import ForeignKey, ForeignKeyConstraint, Index, false
from sqlalchemy.orm import Mapped, mapped_column

from accounting.tables.models import Base, partial_index

TO_MOVE = "replaced_by IS NOT NULL AND is_moved = false"
"""SQLite uses the index for this very text alone."""


class IdempotentPosting(Base):
    """A further posting that pays for a stored answer to several prompts. It is deleted with the answer."""

    __tablename__ = "idempotent_posting"

    request_id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str]
    key: Mapped[str]
    posting: Mapped[bytes]

    __table_args__ = (
        ForeignKeyConstraint(
            ["tenant_id", "key"], ["idempotent_reply.tenant_id", "idempotent_reply.key"], ondelete="CASCADE"
        ),
        Index("ix_idempotent_posting_tenant_id_key", "tenant_id", "key"),
    )


class UnheardAttempt(Base):
    """A charged request whose client left before the first byte of the answer. Only a hash of its content is stored."""

    __tablename__ = "unheard_attempt"

    request_id: Mapped[str] = mapped_column(primary_key=True)
    attempt_id: Mapped[str]
    """The HTTP request. One attempt may be several engine requests."""
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenant.id"))
    key_id: Mapped[str]
    fingerprint: Mapped[bytes]
    ended_at_ms: Mapped[int] = mapped_column(index=True)
    replaced_by: Mapped[str | None]
    """The request that repeated it. Once that request is settled, this one's charge is moved."""
    is_moved: Mapped[bool] = mapped_column(server_default=false())

    __table_args__ = (
        Index("ix_unheard_attempt_key_id_fingerprint", "key_id", "fingerprint"),
        partial_index("ix_unheard_attempt_to_move", "replaced_by", where=TO_MOVE),
    )


class Quote(Base):
    """A price bound to one request for a minute. It reserves nothing."""

    __tablename__ = "quote"

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenant.id"))
    fingerprint: Mapped[bytes]
    model: Mapped[str]
    price_version: Mapped[str]
    currency: Mapped[str]
    max_output_tokens: Mapped[int]
    """The most output tokens of each choice."""
    max_charge: Mapped[int]
    expires_at_ms: Mapped[int] = mapped_column(index=True)
    used_by: Mapped[str | None]
