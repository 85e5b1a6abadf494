"""The judgement of one key: whether its last hours are unusual, what that looks like, and why they cost more. The
module is pure.

A key looks leaked if it asks far more than usual and also does something new: it uses a model that it did not use
before, or works in hours in which it was silent. The first cause of a rise in spending is the largest factor of
requests x tokens per request x price per token, by their logarithms (LMDI; Ang, "The LMDI approach to decomposition
analysis", Energy Policy 33, 2005).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log
from typing import Literal

import msgspec

from accounting.anomalies.bands import Band, band

DAY_S, HOUR_S = 86_400, 3_600
NUM_DAYS = 28
MIN_REQUESTS = 30
"""Requests in an hour that are never many."""
MIN_CHARGE = 100_000
"""Micro-units in an hour that are never much."""
CACHED_SHARE_FELL = 0.1
OUTPUT_SHARE_ROSE = 0.1

Suspicion = Literal["leaked_key", "spend_spike", "more_requests"]
Signal = Literal["more_requests", "more_spend", "new_model", "silent_hour"]
Cause = Literal[
    "more_requests", "longer_requests", "less_from_cache", "new_model", "larger_share_of_output", "price_per_token"
]


class Sums(msgspec.Struct, frozen=True):
    """The use of a key in one hour, or in several."""

    num_requests: int = 0
    cached: int = 0
    """Prompt tokens from the cache."""
    computed: int = 0
    """The other prompt tokens."""
    output: int = 0
    charge: int = 0

    @property
    def tokens(self) -> int:
        return self.cached + self.computed + self.output

    @property
    def cached_share(self) -> float:
        return self.cached / (self.cached + self.computed) if self.cached + self.computed else 0.0

    @property
    def output_share(self) -> float:
        return self.output / self.tokens if self.tokens else 0.0

    def plus(self, other: Sums) -> Sums:
        return Sums(*(mine + its for mine, its in zip(_values(self), _values(other), strict=True)))


class KeyUse(msgspec.Struct, frozen=True):
    """The history of one key."""

    created_at: int
    by_hour: Mapping[int, Sums]
    """The sums of an hour by its first second. Hours without requests are missing."""
    new_models: tuple[str, ...] = ()
    """Models that were used in the judged hours and not in the days before."""


class Finding(msgspec.Struct, frozen=True):
    suspicion: Suspicion
    signals: tuple[Signal, ...]
    hours: tuple[int, ...]
    """The unusual hours, by their first second."""
    peak: int
    """The hour that the amounts are of: the one with the most requests, or with the highest charge."""
    observed: Sums
    requests: Band
    charge: Band
    cause: Cause | None
    """The first cause of the higher charge, if it is higher."""


def judge(use: KeyUse, hours: Sequence[int]) -> Finding | None:
    """Judges these hours of a key by the same hours of the 28 days before. None means that nothing is unusual, or that
    the key is too young."""
    seen = {hour: _Hour.of(use, hour) for hour in hours}
    busy = [hour for hour in hours if seen[hour].has_more("num_requests")]
    dear = [hour for hour in hours if seen[hour].has_more("charge")]
    if not busy and not dear:
        return None
    signals: list[Signal] = []
    if busy:
        signals.append("more_requests")
    if dear:
        signals.append("more_spend")
    if use.new_models:
        signals.append("new_model")
    if any(seen[hour].was_silent for hour in busy):
        signals.append("silent_hour")
    does_something_new = {"new_model", "silent_hour"} & set(signals)
    suspicion: Suspicion = "leaked_key" if busy and does_something_new else "spend_spike" if dear else "more_requests"
    peak = (
        max(dear, key=lambda hour: seen[hour].now.charge)
        if dear
        else max(busy, key=lambda hour: seen[hour].now.num_requests)
    )
    found = seen[peak]
    assert found.requests is not None and found.charge is not None
    cause = _first_cause(found.now, found.past, bool(use.new_models)) if dear else None
    unusual = tuple(sorted({*busy, *dear}))
    return Finding(suspicion, tuple(signals), unusual, peak, found.now, found.requests, found.charge, cause)


class _Hour(msgspec.Struct, frozen=True):
    now: Sums
    past: tuple[Sums, ...]
    requests: Band | None
    charge: Band | None

    @classmethod
    def of(cls, use: KeyUse, hour: int) -> _Hour:
        before = (hour - day * DAY_S for day in range(1, NUM_DAYS + 1))
        past = tuple(use.by_hour.get(one, Sums()) for one in before if one + HOUR_S > use.created_at)
        requests = band([one.num_requests for one in past], MIN_REQUESTS)
        charge = band([one.charge for one in past], MIN_CHARGE)
        return cls(use.by_hour.get(hour, Sums()), past, requests, charge)

    def has_more(self, what: Literal["num_requests", "charge"]) -> bool:
        limit = self.requests if what == "num_requests" else self.charge
        return limit is not None and int(getattr(self.now, what)) > limit.upper

    @property
    def was_silent(self) -> bool:
        """The key was silent in nine of ten such hours."""
        return sum(one.num_requests > 0 for one in self.past) * 10 <= len(self.past)


def _first_cause(now: Sums, past: Sequence[Sums], has_new_model: bool) -> Cause:
    before = Sums()
    for one in past:
        before = before.plus(one)
    if not (before.num_requests and before.tokens and before.charge and now.num_requests and now.tokens):
        return "new_model" if has_new_model and before.num_requests else "more_requests"
    rises: dict[Cause, float] = {
        "more_requests": log(now.num_requests * len(past) / before.num_requests),
        "longer_requests": log(now.tokens / now.num_requests) - log(before.tokens / before.num_requests),
        "price_per_token": log(now.charge / now.tokens) - log(before.charge / before.tokens),
    }
    first = max(rises, key=lambda name: rises[name])
    if first != "price_per_token":
        return first
    if before.cached_share - now.cached_share >= CACHED_SHARE_FELL:
        return "less_from_cache"
    if has_new_model:
        return "new_model"
    return "larger_share_of_output" if now.output_share - before.output_share >= OUTPUT_SHARE_ROSE else first


def _values(sums: Sums) -> tuple[int, ...]:
    return sums.num_requests, sums.cached, sums.computed, sums.output, sums.charge
