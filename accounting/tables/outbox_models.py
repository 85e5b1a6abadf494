"""Tables of webhooks and of the deliveries to them. Rows of `outbox` are edited and deleted; none of them is money."""

from __future__ import annotations

from sqlalchemy import CheckConstraint, ForeignKey, Index, false
from sqlalchemy.orm import Mapped, mapped_column

from accounting.tables.models import Base, partial_index


class Installation(Base):
    """A table of one row: the id that tells this Headgate's events from those of another."""

    __tablename__ = "installation"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    uuid: Mapped[str]

    __table_args__ = (CheckConstraint("id = 1", "one"),)


class Webhook(Base):
    """A webhook. It gets events of its tenant; a webhook of the operator's tenant gets events of all."""

    __tablename__ = "webhook"

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenant.id"), index=True)
    url: Mapped[str]
    events: Mapped[list[str] | None]
    """The event types. None stands for every type."""
    secret: Mapped[bytes]
    """The secret, encrypted under the master key."""
    is_full: Mapped[bool] = mapped_column(server_default=false())
    """Too many deliveries wait for the webhook: new events are not written for it."""
    created_at: Mapped[int]
    is_tenants: Mapped[bool] = mapped_column(server_default=false())
    """The tenant made it for itself: it goes to public addresses only, whatever networks the operator permits."""


class OutboxLane(Base):
    """The queue of a tenant's deliveries. A sender locks the row while it claims from the lane."""

    __tablename__ = "outbox_lane"

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenant.id"), primary_key=True)
    last_turn_ms: Mapped[int] = mapped_column(server_default="0")


class Outbox(Base):
    """One event for one webhook, written in the transaction of the fact it reports."""

    __tablename__ = "outbox"

    event_id: Mapped[str] = mapped_column(primary_key=True)
    webhook_id: Mapped[str] = mapped_column(ForeignKey("webhook.id"), primary_key=True)
    lane: Mapped[str] = mapped_column(ForeignKey("outbox_lane.tenant_id"))
    is_tenants: Mapped[bool] = mapped_column(server_default=false())
    """The tenant made the webhook for itself. Its deliveries have places of their own in the lane."""
    type: Mapped[str]
    body: Mapped[str]
    """The body as it is sent, byte for byte, at every try."""
    state: Mapped[str] = mapped_column(server_default="pending")
    attempts: Mapped[int] = mapped_column(server_default="0")
    """The number of tries. A claim raises it, so that the try of a sender that dies counts."""
    deliver_after_ms: Mapped[int]
    claimed_until_ms: Mapped[int] = mapped_column(server_default="0")
    last_error: Mapped[str | None]
    created_at_ms: Mapped[int]
    ended_at_ms: Mapped[int | None]

    __table_args__ = (
        CheckConstraint("state IN ('pending', 'delivered', 'dead')", "state"),
        partial_index("ix_outbox_due", "lane", "is_tenants", "deliver_after_ms", where="ended_at_ms IS NULL"),
        Index("ix_outbox_lane_claimed_until_ms", "lane", "claimed_until_ms"),
        Index("ix_outbox_webhook_id_state", "webhook_id", "state"),
        Index("ix_outbox_state_ended_at_ms", "state", "ended_at_ms"),
        CheckConstraint("(state = 'pending') = (ended_at_ms IS NULL)", "ended"),
    )
