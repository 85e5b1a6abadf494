"""The request log: one row per HTTP request of a known key, and daily sums of it. No equation reads them, and old rows are
deleted.

Rows have ids, counts, times and what the client named itself (its end user and metadata). They have no text of a prompt
or an answer.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Index, Text
from sqlalchemy.orm import Mapped, mapped_column

from accounting.tables.models import Base, partial_index

ByteOrder = Text().with_variant(Text(collation="C"), "postgresql")
"""Request ids are compared byte by byte, so that their order is that of time in every database."""


class RequestLog(Base):
    __tablename__ = "request_log"

    request_id: Mapped[str] = mapped_column(ByteOrder, primary_key=True)
    """The id begins with the time of acceptance, so the primary key is also the order of the log."""
    is_tail: Mapped[bool]
    """The row is deleted last: the request failed, or was one of the slowest."""
    started_at_ms: Mapped[int]
    tenant_id: Mapped[str]
    key_id: Mapped[str]
    endpoint: Mapped[str]
    """Method and template of the route."""
    model: Mapped[str]
    tier: Mapped[str]
    batch_id: Mapped[str | None]
    end_user: Mapped[str]
    metadata_: Mapped[dict[str, Any] | None] = mapped_column("metadata")
    is_stream: Mapped[bool]
    status: Mapped[int]
    outcome: Mapped[str]
    error_code: Mapped[str]
    finish_reason: Mapped[str]
    prompt_tokens: Mapped[int]
    cached_tokens: Mapped[int]
    cache_write_tokens: Mapped[int]
    output_tokens: Mapped[int]
    charge: Mapped[int]
    currency: Mapped[str]
    ttft_ms: Mapped[int | None]
    duration_ms: Mapped[int]
    num_retries: Mapped[int]
    worker: Mapped[str]
    miss_reason: Mapped[str]
    diverged_at_token: Mapped[int | None]
    trace_id: Mapped[str]
    session_id: Mapped[str] = mapped_column(server_default="")
    """The conversation that the request belongs to, as its client names it."""
    timeline: Mapped[str]
    """The packed timeline (accounting/values/timelines.py)."""

    # A list that is filtered by one of these columns reads two runs of its index: the tail and the other rows.
    __table_args__ = (
        Index("ix_request_log_is_tail", "is_tail", "request_id"),
        Index("ix_request_log_tenant_id", "tenant_id", "is_tail", "request_id"),
        Index("ix_request_log_key_id", "key_id", "is_tail", "request_id"),
        Index("ix_request_log_model", "model", "is_tail", "request_id"),
        Index("ix_request_log_trace_id", "trace_id", "request_id"),
        partial_index("ix_request_log_session_id", "tenant_id", "session_id", "request_id", where="session_id <> ''"),
        partial_index("ix_request_log_end_user", "tenant_id", "end_user", "request_id", where="end_user <> ''"),
        partial_index("ix_request_log_batch_id", "batch_id", "request_id", where="batch_id IS NOT NULL"),
    )


END_USER = "end_user"
"""The label of end users. The other labels are `metadata.` and the name of a field."""


class LabelUsage(Base):
    """The sums of one day's charged requests that have one value of a label: an end user, or a field of the metadata."""

    __tablename__ = "label_usage"

    tenant_id: Mapped[str] = mapped_column(primary_key=True)
    label: Mapped[str] = mapped_column(primary_key=True)
    day_ms: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """The day's first millisecond in UTC."""
    value: Mapped[str] = mapped_column(primary_key=True)
    model: Mapped[str] = mapped_column(primary_key=True)
    currency: Mapped[str] = mapped_column(primary_key=True)
    num_requests: Mapped[int]
    prompt_tokens: Mapped[int]
    cached_tokens: Mapped[int]
    output_tokens: Mapped[int]
    charge: Mapped[int]
    """Micro-units of `currency`."""

    # The sums of a tenant's day are counted in the transaction that adds rows to the log, so the index has all it needs.
    __table_args__ = (
        Index("ix_label_usage_day_ms", "day_ms"),
        Index("ix_label_usage_of_day", "tenant_id", "day_ms", "value"),
    )


class EmbeddingModel(Base):
    """A model that gave embeddings. What it was ever asked for is told as usage of embeddings."""

    __tablename__ = "embedding_model"

    model: Mapped[str] = mapped_column(primary_key=True)
    first_used_at: Mapped[int]
    """Unix seconds."""
