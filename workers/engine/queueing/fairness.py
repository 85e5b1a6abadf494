"""Choice of the tenant that is served next, by weighted virtual token counters. The module knows opaque tenant ids and
numbers.

A tenant's counter grows by the tokens that it is given, divided by its weight. The tenant with the smallest counter is
served. A tenant that becomes active is lifted to the virtual time less a credit. The virtual time is the largest value
that the smallest active counter ever had. So a tenant may get back what it recently left to others, up to the credit
(engine.md section 3.3, ADR 61). A tenant that rarely asks, and then twice in a row, does not wait until a flood has
been given as much as it was.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Generator
from itertools import islice

from workers.engine.queueing.sweeping import swept

COMPUTED_CHARGE = 1.0
CACHED_CHARGE = 0.1
OUTPUT_CHARGE = 2.0

RECENT_S = 30.0
MAX_REMEMBERED = 4096
RETURN_S = 10.0
"""Seconds after its last service during which a tenant may come back in any step."""
MAX_RETURNING = 64
"""Largest number of such tenants, the last ones served, among which the lightest is looked for."""

Rank = tuple[bool, int]

MAX_NAMED = 64
"""Largest number of tenants that are considered for one choice. Tenants are passed over while they wait for a prefix
that is being computed."""


class VirtualCounters:
    """One counter per tenant. `enter` and `leave` bracket each request of a tenant in the worker."""

    def __init__(self, credit: float = 0.0) -> None:
        """Creates the counters. `credit` is how far below the virtual time a tenant may become active."""
        self._credit = credit
        self._counters: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._num_requests: dict[str, int] = {}
        self._time = 0.0

    def __getitem__(self, tenant: str) -> float:
        return self._counters.get(tenant, self._time - self._credit)

    def enter(self, tenant: str, weight: float) -> None:
        self._weights[tenant] = weight
        count = self._num_requests.get(tenant, 0)
        if count == 0:
            self._counters[tenant] = self.level(tenant)
        self._num_requests[tenant] = count + 1

    def num_requests(self, tenant: str) -> int:
        """Returns the number of its requests that entered and did not leave."""
        return self._num_requests.get(tenant, 0)

    def leave(self, tenant: str) -> None:
        """Ends one request of a tenant. The last one deletes the tenant's state, unless its counter shows that its
        credit is not whole yet."""
        self._num_requests[tenant] -= 1
        if self._num_requests[tenant] > 0:
            return
        self._advance()
        del self._num_requests[tenant], self._weights[tenant]
        if len(self._counters) > len(self._num_requests) + MAX_REMEMBERED:
            self._forget()
        elif self._counters[tenant] <= self._time - self._credit:
            del self._counters[tenant]

    def level(self, tenant: str) -> float:
        """Returns the tenant's counter, or the value that it would have if the tenant became active now."""
        if tenant not in self._num_requests:
            self._advance()
            return max(self[tenant], self._time - self._credit)
        return self._counters[tenant]

    def weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def charge(self, tenant: str, *, computed: int = 0, cached: int = 0, output: int = 0) -> None:
        cost = COMPUTED_CHARGE * computed + CACHED_CHARGE * cached + OUTPUT_CHARGE * output
        self._counters[tenant] += cost / self._weights[tenant]

    def refund(self, tenant: str, *, computed: int) -> None:
        """Takes back the charge for tokens that were not computed after all."""
        self._counters[tenant] -= COMPUTED_CHARGE * computed / self._weights[tenant]

    def _advance(self) -> None:
        """Moves the virtual time forward. It stands still while nobody is active. O(active tenants)."""
        active = (self._counters[tenant] for tenant in self._num_requests)
        self._time = max(self._time, min(active, default=self._time))

    def _forget(self) -> None:
        """Deletes counters of tenants that are not active and whose credit is whole, or at least half of the inactive
        ones. The latter get their credit back early."""
        idle = sorted(self._counters.keys() - self._num_requests.keys(), key=self._counters.__getitem__)
        for number, tenant in enumerate(idle):
            if number >= len(idle) // 2 and self._counters[tenant] > self._time - self._credit:
                break
            del self._counters[tenant]


class RecentService:
    """Fading sum of the tokens that each tenant was given recently. Unlike a counter it remembers who was idle. Of the
    prompts being computed, those of the tenant that got least go first (least attained service), so a flood does not
    delay the prompt of a tenant that rarely asks. Only the counters decide how much each tenant gets in the long
    run."""

    def __init__(self) -> None:
        self._given: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Map from tenant to (amount, time at which it was that amount). The tenant served last is the last entry."""

    def add(self, tenant: str, amount: float, now: float) -> None:
        self._given[tenant] = self.of(tenant, now) + amount, now
        self._given.move_to_end(tenant)
        if len(self._given) > MAX_REMEMBERED:
            known = sorted(self._given, key=lambda t: self.of(t, now))
            for forgotten in known[: len(known) // 2]:
                del self._given[forgotten]

    def of(self, tenant: str, now: float) -> float:
        amount, at = self._given.get(tenant, (0.0, now))
        return amount * math.exp((at - now) / RECENT_S)

    def lightest(self, now: float) -> float:
        """Returns the smallest recent service among the tenants that may come back at any moment. It is infinite if
        there are none."""
        least = math.inf
        for tenant in islice(reversed(self._given), MAX_RETURNING):
            if now - self._given[tenant][1] > RETURN_S:
                break
            least = min(least, self.of(tenant, now))
        return least


class TenantOrder:
    """Tenants that have something to serve, the smallest counter first. A step of the iteration takes O(log tenants)
    amortised: counters grow, so an entry that is out of date is moved down when it comes to the top."""

    def __init__(self, counters: VirtualCounters) -> None:
        self._counters = counters
        self._heap: list[tuple[float, Rank, str]] = []
        self._live_entry: dict[str, Rank] = {}
        self._num_entries = 0

    def add(self, tenant: str) -> None:
        """Adds a tenant. Of tenants with equal counters the first to come goes first, but newcomers go before tenants
        that were served since. The reason is that a tenant that becomes active is lifted to the smallest counter, often
        that of the only tenant served."""
        self._enter(tenant, served=False)

    def served(self, tenant: str) -> None:
        self._enter(tenant, served=True)

    def _enter(self, tenant: str, *, served: bool) -> None:
        self._num_entries += 1
        rank = (served, self._num_entries)
        self._live_entry[tenant] = rank
        heapq.heappush(self._heap, (self._counters[tenant], rank, tenant))
        self._sweep()

    def discard(self, tenant: str) -> None:
        self._live_entry.pop(tenant, None)
        self._sweep()

    def _sweep(self) -> None:
        self._heap = swept(self._heap, len(self._live_entry), lambda entry: self._live_entry.get(entry[2]) == entry[1])

    def smallest_first(self) -> Generator[str, None, None]:
        """Yields at most `MAX_NAMED` tenants. Tenants that the caller does not ask for cost nothing. Nobody may be
        added or discarded during the iteration."""
        named: list[tuple[float, Rank, str]] = []
        try:
            while self._heap and len(named) < MAX_NAMED:
                counter, entry, tenant = self._heap[0]
                if self._live_entry.get(tenant) != entry:
                    heapq.heappop(self._heap)
                elif counter < self._counters[tenant]:
                    heapq.heapreplace(self._heap, (self._counters[tenant], entry, tenant))
                else:
                    named.append(heapq.heappop(self._heap))
                    yield tenant
        finally:
            for item in named:
                heapq.heappush(self._heap, item)
