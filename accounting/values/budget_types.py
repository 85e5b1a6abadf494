"""Budgets and quotas as values, and the arithmetic of their periods. The module is pure: no clock, no SQL, no Redis.

Intervals are half open, in UTC, in Unix milliseconds. Money is in micro-units.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Literal

import msgspec

from accounting.values.model_names import base_of

PeriodKind = Literal["hour", "day", "month", "fixed"]
Hardness = Literal["hard", "soft", "shadow"]
"""The effect of a budget. hard: it refuses and stops requests. soft: it alerts. shadow: it also counts in metrics what
a hard one would have refused."""

THRESHOLDS = (50, 80, 100)
"""Percentages of a budget at which an alert is due."""

MAX_AMOUNT = 2**53 - 1
"""The highest amount in micro-units. Beyond it a Lua number, which is a double, would lose units."""

HOUR_S = 3_600
HOUR_MS = HOUR_S * 1000

KNOWN_AFTER_MS = 10_000
"""Milliseconds after its creation at which every gateway counts against a budget."""


class Period(msgspec.Struct, frozen=True):
    start_ms: int
    end_ms: int


class Adjustment(msgspec.Struct, frozen=True):
    """A change of a budget's limit for a time. It raises the limit, or lowers it if negative."""

    id: str
    micro_units: int
    from_ms: int
    until_ms: int


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `budget` with its adjustments. The scope is the tenant or one of its keys, perhaps restricted to one
    model or tier. A model stands for its adapters and its overflow, too."""

    id: str
    tenant_id: str
    key_id: str | None = None
    model: str | None = None
    tier: str | None = None
    period: PeriodKind
    start_ms: int = 0
    """The beginning of a fixed period; like `end_ms`, it is used for fixed periods only."""
    end_ms: int = 0
    limit_micro_units: int
    hardness: Hardness = "hard"
    created_at: int = 0
    version: int = 0
    """The version of the row. Of two readings the one with the higher number is newer."""
    adjustments: tuple[Adjustment, ...] = ()

    @property
    def scope(self) -> Literal["key", "tenant"]:
        return "tenant" if self.key_id is None else "key"

    def binds(self, key_id: str, model: str | None, tier: str) -> bool:
        """Says whether the budget limits a request that is billed under the name `model`. With `model` None: whether it
        does so for some model."""
        return (
            self.key_id in (None, key_id)
            and (self.model is None or model is None or self.model in (model, base_of(model)))
            and self.tier in (None, tier)
        )

    def period_at(self, now_ms: int) -> Period | None:
        """Returns the period of a request that began at that time, or None if a fixed period has not begun or is
        over."""
        if self.period == "fixed":
            inside = self.start_ms <= now_ms < self.end_ms
            return Period(self.start_ms, self.end_ms) if inside else None
        return _calendar(self.period, now_ms // HOUR_MS)

    def limit_at(self, now_ms: int) -> int:
        change = sum(
            adjustment.micro_units
            for adjustment in self.adjustments
            if adjustment.from_ms <= now_ms < adjustment.until_ms
        )
        return min(MAX_AMOUNT, max(0, self.limit_micro_units + change))

    def begins_empty(self, period: Period) -> bool:
        """Says whether every gateway knew this budget before the period began, so that nothing can have been charged to
        the period without being counted."""
        return self.created_at * 1000 + KNOWN_AFTER_MS <= period.start_ms


Level = Literal["key", "tenant", "model", "end_user"]
Dimension = Literal[
    "requests_per_minute",
    "tokens_per_minute",
    "input_tokens_per_minute",
    "output_tokens_per_minute",
    "requests_per_day",
    "batch_tokens_per_day",
    "concurrency",
]


class Quota(msgspec.Struct, frozen=True):
    """One limit. `subject` is the id of a key or a model. It is empty for the tenant itself, and for each of its end
    users."""

    level: Level
    subject: str
    dimension: Dimension
    limit: int
    shadow: bool = False
    """A shadow limit is counted where it would have refused, and never enforced."""


@lru_cache(maxsize=1024)
def _calendar(kind: Literal["hour", "day", "month"], hour: int) -> Period:
    now = datetime.fromtimestamp(hour * HOUR_S, UTC)
    if kind == "hour":
        return _period(now, now + timedelta(hours=1))
    start = now.replace(hour=0)
    if kind == "day":
        return _period(start, start + timedelta(days=1))
    start = start.replace(day=1)
    return _period(start, (start + timedelta(days=32)).replace(day=1))


def _period(start: datetime, end: datetime) -> Period:
    return Period(int(start.timestamp()) * 1000, int(end.timestamp()) * 1000)
