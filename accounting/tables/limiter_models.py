"""Tables by which gateways inform each other, so that the limiter's state can be rebuilt (metering.md 6.5)."""

from __future__ import annotations

from sqlalchemy import Index, LargeBinary
from sqlalchemy.orm import Mapped, mapped_column

from accounting.tables.models import Base


class LimiterIncident(Base):
    """A loss of limiter state. From now on only a state built under this epoch counts. `tenant_id` is None for a loss
    of every tenant's state."""

    __tablename__ = "limiter_incident"

    epoch: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    tenant_id: Mapped[str | None]
    life: Mapped[str | None]
    """The id of the life of Redis' data that began, for an incident of that kind."""
    raised_at_ms: Mapped[int]

    __table_args__ = (Index("ix_limiter_incident_tenant_id_epoch", "tenant_id", "epoch"),)


class LimiterGateway(Base):
    """A gateway that runs, or that died without removing its row. Its requests at `epoch` are listed."""

    __tablename__ = "limiter_gateway"

    slot: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    epoch: Mapped[int]
    listed_at_ms: Mapped[int]


class LimiterRunning(Base):
    """A request that a gateway was running when it learned of an epoch."""

    __tablename__ = "limiter_running"

    epoch: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    request_id: Mapped[str] = mapped_column(primary_key=True)
    slot: Mapped[int]
    tenant_id: Mapped[str]
    opened_ms: Mapped[int]
    detail: Mapped[bytes] = mapped_column(LargeBinary)
    """The data that the limiter needs of the request, as the gateways write it."""

    __table_args__ = (Index("ix_limiter_running_tenant_id_epoch", "tenant_id", "epoch"),)


class LimiterBuilt(Base):
    """A claim to build a tenant's state under an epoch. One gateway builds it, once. The claim was in Redis before."""

    __tablename__ = "limiter_built"

    tenant_id: Mapped[str] = mapped_column(primary_key=True)
    epoch: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    slot: Mapped[int]
    """The gateway that brought the claim here."""
    claimed_at_ms: Mapped[int]


class EndUserUse(Base):
    """The amounts that one request took of an end user's windows. A row exists only if a limit counts them, and for a
    day; the ledger knows no end users."""

    __tablename__ = "end_user_use"

    request_id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str]
    place: Mapped[str]
    """The end user's name in the limiter: a digest."""
    opened_at_ms: Mapped[int]
    ended_at_ms: Mapped[int]
    input: Mapped[int]
    output: Mapped[int]

    __table_args__ = (Index("ix_end_user_use_tenant_id_opened_at_ms", "tenant_id", "opened_at_ms"),)
