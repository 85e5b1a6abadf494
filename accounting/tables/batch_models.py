"""The tables of files and batches, as a Celery message never holds state. The rules of models.py apply.

Rows of these tables are edited and deleted, as none of them is money. The cost of a line is in the ledger.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import CheckConstraint, ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from accounting.tables.models import Base, partial_index


class DataKey(Base):
    """A tenant's key for stored texts, wrapped by the master key. Without the row nobody can read its texts."""

    __tablename__ = "data_key"

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenant.id"), primary_key=True)
    wrapped: Mapped[bytes]
    created_at: Mapped[int]


class File(Base):
    """A file. The name is metadata and never a path; the bytes are stored under `storage_key`, encrypted."""

    __tablename__ = "file"

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenant.id"))
    purpose: Mapped[str]
    name: Mapped[str]
    num_bytes: Mapped[int]
    sha256: Mapped[str]
    storage_key: Mapped[str | None]
    """The name of the bytes in the file store. The value is None once the bytes are deleted."""
    created_at: Mapped[int]
    expires_at: Mapped[int | None]
    deleted_at: Mapped[int | None]

    __table_args__ = (
        Index("ix_file_tenant_id_created_at", "tenant_id", "created_at"),
        partial_index("ix_file_room", "tenant_id", "num_bytes", where="storage_key IS NOT NULL"),
    )


class Batch(Base):
    """A batch. The state changes by compare-and-set. Money is never stored here: it is a sum over the ledger."""

    __tablename__ = "batch"

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenant.id"))
    key_id: Mapped[str] = mapped_column(ForeignKey("api_key.id"))
    endpoint: Mapped[str]
    model: Mapped[str | None]
    completion_window: Mapped[str]
    input_file_id: Mapped[str] = mapped_column(ForeignKey("file.id"))
    output_file_id: Mapped[str | None] = mapped_column(ForeignKey("file.id"))
    error_file_id: Mapped[str | None] = mapped_column(ForeignKey("file.id"))
    state: Mapped[str]
    created_at: Mapped[int]
    expires_at: Mapped[int]
    in_progress_at: Mapped[int | None]
    finalizing_at: Mapped[int | None]
    completed_at: Mapped[int | None]
    failed_at: Mapped[int | None]
    expired_at: Mapped[int | None]
    cancelling_at: Mapped[int | None]
    cancelled_at: Mapped[int | None]
    paused_reason: Mapped[str | None]
    invalid_lines: Mapped[str] = mapped_column(server_default="reject")
    output_expires_after_s: Mapped[int | None]
    num_total: Mapped[int] = mapped_column(server_default="0")
    num_completed: Mapped[int] = mapped_column(server_default="0")
    num_failed: Mapped[int] = mapped_column(server_default="0")
    cache_read: Mapped[int] = mapped_column(server_default="0")
    cache_write: Mapped[int] = mapped_column(server_default="0")
    uncached: Mapped[int] = mapped_column(server_default="0")
    output: Mapped[int] = mapped_column(server_default="0")
    num_invalid: Mapped[int] = mapped_column(server_default="0")
    """The number of faulty input lines; `errors` holds the first thousand."""
    errors: Mapped[list[Any] | None]
    fence: Mapped[int] = mapped_column(server_default="0")
    """The fence of the claim to validate or finalise the batch as a whole."""
    claimed_until_ms: Mapped[int | None]
    metadata_: Mapped[dict[str, Any] | None] = mapped_column("metadata")
    traceparent: Mapped[str] = mapped_column(server_default="")

    __table_args__ = (
        CheckConstraint(
            "state IN ('validating', 'failed', 'in_progress', 'finalizing', 'completed', 'expired',"
            " 'cancelling', 'cancelled')",
            "state",
        ),
        Index("ix_batch_tenant_id_created_at", "tenant_id", "created_at"),
        Index("ix_batch_state_expires_at", "state", "expires_at"),
        partial_index(
            "ix_batch_open", "tenant_id", where="state IN ('validating', 'in_progress', 'finalizing', 'cancelling')"
        ),
    )


class BatchChunk(Base):
    """A part of a batch's lines. A claim lasts until `claimed_until_ms` by the database's clock; each claim raises the
    fence."""

    __tablename__ = "batch_chunk"

    batch_id: Mapped[str] = mapped_column(ForeignKey("batch.id"), primary_key=True)
    seq: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    tenant_id: Mapped[str]
    state: Mapped[str] = mapped_column(server_default="queued")
    claimed_by: Mapped[str | None]
    claimed_until_ms: Mapped[int | None]
    fence: Mapped[int] = mapped_column(server_default="0")
    not_before_ms: Mapped[int] = mapped_column(server_default="0")
    predicted_tokens: Mapped[int]
    num_lines: Mapped[int]
    lines: Mapped[bytes]
    """A packed list of (line_no, offset, length)."""

    __table_args__ = (
        CheckConstraint("state IN ('queued', 'claimed', 'done')", "state"),
        Index("ix_batch_chunk_state_tenant_id", "state", "tenant_id"),
        partial_index("ix_batch_chunk_queued", "batch_id", "not_before_ms", "seq", where="state = 'queued'"),
    )


class BatchLine(Base):
    """A line that was started or has ended. It becomes terminal exactly once."""

    __tablename__ = "batch_line"

    batch_id: Mapped[str] = mapped_column(ForeignKey("batch.id"), primary_key=True)
    line_no: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    chunk_seq: Mapped[int | None]
    """The chunk of the line. A faulty line is in no chunk, so the value is None."""
    custom_id: Mapped[str | None]
    """The value is None if the input has no `custom_id` of this line alone."""
    state: Mapped[str] = mapped_column(server_default="started")
    ended_no: Mapped[int | None]
    """The line's place in the order in which the lines of the batch ended, from 1 on. A line has none before it ends, nor if
    a jobs process from before migration 0029 ended it."""
    failures: Mapped[int] = mapped_column(server_default="0")
    crashes: Mapped[int] = mapped_column(server_default="0")
    request_id: Mapped[str | None]
    status: Mapped[int | None]
    body: Mapped[bytes | None]
    """The answer, encrypted under the tenant's data key. It is deleted once the files are written."""
    error: Mapped[dict[str, Any] | None]
    cache_read: Mapped[int] = mapped_column(server_default="0")
    cache_write: Mapped[int] = mapped_column(server_default="0")
    uncached: Mapped[int] = mapped_column(server_default="0")
    output: Mapped[int] = mapped_column(server_default="0")

    __table_args__ = (
        CheckConstraint("state IN ('started', 'succeeded', 'errored', 'cancelled', 'expired')", "state"),
        partial_index("ix_batch_line_ended", "batch_id", "ended_no", where="ended_no IS NOT NULL", unique=True),
    )


class IdempotentReply(Base):
    """One Idempotency-Key of a tenant: running, or the stored answer with the posting that pays for it."""

    __tablename__ = "idempotent_reply"

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenant.id"), primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    fingerprint: Mapped[bytes]
    request_id: Mapped[str] = mapped_column(unique=True)
    slot: Mapped[int]
    """The slot of the gateway that runs the request. A gateway that restarts in that slot frees the keys that were left
    running."""
    batch_id: Mapped[str | None] = mapped_column(index=True)
    line_no: Mapped[int | None]
    state: Mapped[str] = mapped_column(server_default="running")
    status: Mapped[int | None]
    content_type: Mapped[str | None]
    """The type of a stored answer. None stands for JSON."""
    body: Mapped[bytes | None]
    num_bytes: Mapped[int] = mapped_column(server_default="0")
    """The bytes of the body. While the request runs, they are the bytes that are reserved for it."""
    posting: Mapped[bytes | None]
    created_at: Mapped[int]
    expires_at: Mapped[int]

    __table_args__ = (
        CheckConstraint("state IN ('running', 'stored')", "state"),
        partial_index("ix_idempotent_reply_running", "slot", "created_at", where="state = 'running'"),
        partial_index("ix_idempotent_reply_stored", "batch_id", "expires_at", where="state = 'stored'"),
        partial_index("ix_idempotent_reply_room", "tenant_id", "expires_at", "num_bytes", where="batch_id IS NULL"),
    )


class TenantTurn(Base):
    """The state of a tenant in the round robin over chunks."""

    __tablename__ = "tenant_turn"

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenant.id"), primary_key=True)
    deficit_tokens: Mapped[int] = mapped_column(server_default="0")
    last_visit: Mapped[int] = mapped_column(server_default="0")
    """A counter over the visits of all tenants. The tenant with the smallest value is next."""
