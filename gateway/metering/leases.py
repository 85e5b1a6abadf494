"""The permission of one running request to spend output tokens, and its extension while the stream runs.

The bound precedes the spend: it only grows by what the limiter granted. It knows no frames and no journal.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import lru_cache

from accounting.prices.pricing import lease_cost
from accounting.values import clock
from accounting.values.types import Rates
from gateway.base.redis_link import LimiterUnavailable
from gateway.limiter.limits import Ladder, Limiter, ReservationEnded, Verdict
from gateway.limiter.rules import BudgetUse, LimitSubject

LEASE_TOKENS = 128
LOW_WATER = 64
LOST_AFTER_S = 15.0
RETRY_S = 0.25
MAX_WAIT_MS = 10_000
"""The longest wait, below the 15 s of silence after which a worker ends a parked sequence."""


class LeaseLost(Exception):
    """The lease could not be extended, through the platform's fault: the request ends with outcome `lease_lost` and is
    billed 0.
    """


@dataclass(frozen=True)
class Extension:
    """The content of `ExtendLease`. With `wait_ms` the bound has not grown: ask again after that time."""

    lease_seq: int
    bound: int
    last: bool = False
    wait_ms: int = 0


def ladder(wanted: int, rates: Rates) -> Ladder:
    """Returns the rungs that the limiter may choose from: 128 or all that is wanted, then powers of two down to 1."""
    return _rungs(min(LEASE_TOKENS, wanted), rates)


@lru_cache(maxsize=1024)
def _rungs(first: int, rates: Rates) -> Ladder:
    below = [1 << n for n in reversed(range(LEASE_TOKENS.bit_length())) if 1 << n < first]
    return tuple((tokens, lease_cost(tokens, rates)) for tokens in ([first, *below] if first else []))


class Lease:
    def __init__(self, limiter: Limiter, holder: LimitSubject, rates: Rates, max_output: int, verdict: Verdict) -> None:
        self.bound = verdict.bound
        self.seq = 0
        self.reserved = verdict.reserved
        """Micro-units over all leases and the prompt."""
        self.stop: BudgetUse | None = None
        """The budget that allows no further grant."""
        self._limiter = limiter
        self._holder = holder
        self._rates = rates
        self._max_output = max_output
        self._not_before = 0.0
        self._failing_since: float | None = None
        self._busy = False

    def is_due(self, num_received: int) -> bool:
        wanted = self.stop is None and self.bound < self._max_output
        return wanted and self.bound - num_received <= LOW_WATER

    async def extend(self, num_received: int, counted_prompt: int = -1) -> Extension | None:
        """Extends the lease if it is due. None means that there is nothing to send to the worker now. Raises LeaseLost
        once the limiter has failed for 15 s.
        """
        now = asyncio.get_running_loop().time()
        if self._busy or now < self._not_before or not self.is_due(num_received):
            return None
        self._busy = True
        try:
            return await self._ask(now, counted_prompt)
        finally:
            self._busy = False

    async def _ask(self, now: float, counted_prompt: int) -> Extension | None:
        rungs = ladder(self._max_output - self.bound, self._rates)
        try:
            grant = await self._limiter.extend(self._holder, self.seq + 1, rungs, clock.now_ms(), counted_prompt)
        except ReservationEnded as reason:
            raise LeaseLost(str(reason)) from reason
        except LimiterUnavailable as reason:
            self._failing_since = now if self._failing_since is None else self._failing_since
            if now - self._failing_since >= LOST_AFTER_S:
                raise LeaseLost(str(reason)) from reason
            self._not_before = now + RETRY_S
            return None
        self._failing_since = None
        self.seq += 1
        self.bound, self.reserved = grant.bound, grant.reserved
        if grant.stop is not None:
            self.stop = grant.stop
            return Extension(self.seq, self.bound, last=True)
        wait_ms = min(grant.wait_ms, MAX_WAIT_MS)
        self._not_before = now + wait_ms / 1000
        return Extension(self.seq, self.bound, wait_ms=wait_ms)
