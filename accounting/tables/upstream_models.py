"""The tables of upstreams: servers of others that answer for models. The rules of models.py apply.

Rows of `upstream` are edited and deleted; its keys are encrypted. Rows of `upstream_call` and `upstream_cost_day` are only
added. Those of `upstream_cost` are judged anew when a call or another row comes.
"""

from __future__ import annotations

from sqlalchemy import CheckConstraint, Index
from sqlalchemy.orm import Mapped, mapped_column

from accounting.tables.models import Base


class UpstreamRow(Base):
    """An upstream that was declared over the API."""

    __tablename__ = "upstream"

    name: Mapped[str] = mapped_column(primary_key=True)
    declared: Mapped[str]
    """The declaration as JSON, without the credential."""
    sealed_key: Mapped[bytes]
    """The credential, encrypted under a key that the master key derives."""
    sealed_cost_key: Mapped[bytes | None]
    """The credential for the provider's cost API, encrypted in the same way; NULL if there is none."""
    created_at: Mapped[int]


class UpstreamCall(Base):
    """One attempt at an upstream: what its provider states, what we judge, and what it should cost."""

    __tablename__ = "upstream_call"

    request_id: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    tenant_id: Mapped[str]
    upstream: Mapped[str]
    model: Mapped[str]
    state: Mapped[str]
    started_at_ms: Mapped[int]
    provider_id: Mapped[str]
    has_statement: Mapped[bool]
    stated_cache_read: Mapped[int]
    stated_cache_write: Mapped[int]
    stated_uncached: Mapped[int]
    stated_output: Mapped[int]
    judged_cache_read: Mapped[int]
    judged_cache_write: Mapped[int]
    judged_uncached: Mapped[int]
    judged_output: Mapped[int]
    drift: Mapped[str]
    expected_cost: Mapped[int]
    stated_cost: Mapped[int | None]

    __table_args__ = (
        CheckConstraint("state IN ('delivered', 'cut', 'failed')", "state"),
        Index("ix_upstream_call_started_at_ms", "started_at_ms"),
        Index("ix_upstream_call_provider_id", "upstream", "provider_id"),
    )


class UpstreamCost(Base):
    """A row of a provider's bill, and what became of it."""

    __tablename__ = "upstream_cost"

    upstream: Mapped[str] = mapped_column(primary_key=True)
    row_id: Mapped[str] = mapped_column(primary_key=True)
    provider_id: Mapped[str]
    billed_at_ms: Mapped[int]
    amount: Mapped[int]
    """Micro-units; negative for a refund."""
    matched: Mapped[int]
    """The expected cost of its call; 0 without one. What the amount has beyond it, or lacks of it, is drift."""
    account: Mapped[str]
    """The name of the account of the drift; empty if there is none."""
    posted_at_ms: Mapped[int]

    __table_args__ = (Index("ix_upstream_cost_provider_id", "upstream", "provider_id"),)


class UpstreamCostDay(Base):
    """The bill of a provider for one line item of one day, as its cost API said it at one time. A correction is a further
    revision, and the last one is in force."""

    __tablename__ = "upstream_cost_day"

    upstream: Mapped[str] = mapped_column(primary_key=True)
    day: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """The first second of a day of UTC."""
    line_item: Mapped[str] = mapped_column(primary_key=True)
    currency: Mapped[str] = mapped_column(primary_key=True)
    revision: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """1, 2, and so on."""
    amount: Mapped[int]
    """Micro-units; negative for a credit, 0 for a line that the provider took back."""
    pulled_at_ms: Mapped[int]

    __table_args__ = (
        CheckConstraint("day % 86400 = 0", "day"),
        CheckConstraint("revision > 0", "revision"),
        Index("ix_upstream_cost_day_day", "day"),
    )


class UpstreamCostPull(Base):
    """The state of reading an upstream's cost API. The row is edited."""

    __tablename__ = "upstream_cost_pull"

    upstream: Mapped[str] = mapped_column(primary_key=True)
    claimed_until_ms: Mapped[int]
    """The time until which the process that claimed the pull is alone; 0 if none did."""
    tried_at_ms: Mapped[int]
    """The end of the last pull, whether it succeeded or failed; 0 before the first."""
    pulled_at_ms: Mapped[int]
    """The begin of the last pull that succeeded; 0 before the first."""
    first_day: Mapped[int]
    """The first day that was ever read; days before it are not compared."""
    fault: Mapped[str]
    """A fixed word for the reason why the last pull failed; empty if it succeeded."""
