"""What gateways tell each other through SQL so that the limiter's state can be made again (metering.md 6.5)."""

from __future__ import annotations

from sqlalchemy import Index, LargeBinary
from sqlalchemy.orm import Mapped, mapped_column

from accounting.tables.models import Base


class LimiterIncident(Base):
    """A loss. From here on only a state built under this epoch is believed; `tenant_id` None: every tenant's."""

    __tablename__ = "limiter_incident"

    epoch: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    tenant_id: Mapped[str | None]
    life: Mapped[str | None]
    """Which life of Redis' data began, where one did."""
    raised_at_ms: Mapped[int]


class LimiterGateway(Base):
    """A gateway that lives, or died without a word. What it held up to `epoch` is listed."""

    __tablename__ = "limiter_gateway"

    slot: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    epoch: Mapped[int]
    listed_at_ms: Mapped[int]


class LimiterRunning(Base):
    """A request that a gateway held when it learned of an epoch."""

    __tablename__ = "limiter_running"

    epoch: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    request_id: Mapped[str] = mapped_column(primary_key=True)
    slot: Mapped[int]
    tenant_id: Mapped[str]
    opened_ms: Mapped[int]
    detail: Mapped[bytes] = mapped_column(LargeBinary)
    """What the limiter must know of it, as the gateways write it."""

    __table_args__ = (Index("ix_limiter_running_tenant_id_epoch", "tenant_id", "epoch"),)


class LimiterBuilt(Base):
    """One gateway builds a tenant's state under an epoch, once."""

    __tablename__ = "limiter_built"

    tenant_id: Mapped[str] = mapped_column(primary_key=True)
    epoch: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    slot: Mapped[int]
    claimed_at_ms: Mapped[int]


class EndUserUse(Base):
    """What one request took of an end user's windows. Only where a limit counts them, and for a day: the ledger knows
    no end users."""

    __tablename__ = "end_user_use"

    request_id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str]
    place: Mapped[str]
    """As the limiter names the end user: a digest."""
    opened_at_ms: Mapped[int]
    ended_at_ms: Mapped[int]
    input: Mapped[int]
    output: Mapped[int]

    __table_args__ = (Index("ix_end_user_use_tenant_id_opened_at_ms", "tenant_id", "opened_at_ms"),)
