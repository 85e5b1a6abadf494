"""The tables of stored responses (`/v1/responses`). The rules of models.py apply.

Rows of these tables are edited and deleted. Their texts are encrypted under the tenant's data key; costs are in the
ledger.
"""

from __future__ import annotations

from sqlalchemy import CheckConstraint, ForeignKey, Index, false
from sqlalchemy.orm import Mapped, mapped_column

from accounting.tables.models import Base, partial_index


class Response(Base):
    """A stored response. One that runs in the background has its row from the start, any other from its end."""

    __tablename__ = "response"

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenant.id"))
    key_id: Mapped[str] = mapped_column(ForeignKey("api_key.id"))
    state: Mapped[str]
    is_background: Mapped[bool] = mapped_column(server_default=false())
    previous_id: Mapped[str | None]
    """The response that this one goes on from. It may be gone."""
    num_before: Mapped[int] = mapped_column(server_default="0")
    """The number of responses in the chain before this one."""
    chain_bytes: Mapped[int] = mapped_column(server_default="0")
    """The bytes of JSON of the whole chain, this response included."""
    request: Mapped[bytes]
    """The body that was asked, encrypted."""
    body: Mapped[bytes | None]
    """The Response object, encrypted. The value is None until the response has ended."""
    num_bytes: Mapped[int]
    """The bytes that are stored, events included."""
    created_at: Mapped[int]
    expires_at: Mapped[int] = mapped_column(index=True)
    fence: Mapped[int] = mapped_column(server_default="0")
    """Each claim to run the response raises it."""
    claimed_until_ms: Mapped[int] = mapped_column(server_default="0")
    is_stopping: Mapped[bool] = mapped_column(server_default=false())
    """Somebody has asked for the end of the run."""
    next_number: Mapped[int] = mapped_column(server_default="0")
    """The number of the next event."""

    __table_args__ = (
        CheckConstraint(
            "state IN ('queued', 'in_progress', 'completed', 'incomplete', 'failed', 'cancelled')", "state"
        ),
        Index("ix_response_tenant_id_created_at", "tenant_id", "created_at"),
        partial_index("ix_response_due", "claimed_until_ms", where="state IN ('queued', 'in_progress')"),
    )


class ResponseEvents(Base):
    """Neighbouring events of a response that runs, or ran, in the background."""

    __tablename__ = "response_events"

    response_id: Mapped[str] = mapped_column(ForeignKey("response.id", ondelete="CASCADE"), primary_key=True)
    first_number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    events: Mapped[bytes]
    """A list of events, encrypted."""


class ResponseTotal(Base):
    """The number and the bytes of a tenant's responses, so that no request has to count them."""

    __tablename__ = "response_total"

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenant.id"), primary_key=True)
    num_responses: Mapped[int]
    num_bytes: Mapped[int]
