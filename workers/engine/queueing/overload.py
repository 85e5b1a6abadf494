"""Choice of the requests to refuse because a first token would come too late, and of the time after which to come
again. The module is pure; the clock is given.

The work ahead of an arrival is what its tenant's fair share lets pass before it: its own tenant's queue, and of each
other tenant no more than until the counters are level. The time that this takes is forecast (forecast.py).

A refused request is sent the time at which the wait will be short enough, and a reservation is kept for it until then.
The reservation counts as if the request stood in the queue. So those refused after it are sent a later time, and
newcomers do not take its turn. The request is recognised by its tenant and prompt when it comes again. A reservation
that is not claimed lapses. Without reservations a worker with more clients than it can serve would send all of them the
same moment, and most of them would come in vain. A worker that rests has capacity for everybody: the times that it sent
were too late, and it keeps no reservations.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from workers.engine.queueing.fairness import VirtualCounters
from workers.engine.queueing.forecast import Queued

JITTER = 0.2
GRACE_S = 5.0
"""Seconds for which a reservation is kept after the time that was sent."""

LONGEST_S = 120.0
"""Longest time in seconds for which a reservation is kept. Clients that are sent a later time do not come again."""

SHORT = 0.25
"""Part of the target. While the wait of the real queue is no longer than that, every request is let in. Otherwise
reservations of clients that never come would keep the device idle."""

SLACK = 1.25
"""Multiple of the target. A request that comes at the time it was sent is let in while the wait is no longer than
that."""

EARLY_S = 5.0
"""Seconds by which the wait must be shorter than the target at the time that a refused request is sent, or half of the
target if that is less. With a queue just as long as the target, a request that comes a moment early would be refused
again."""


@dataclass(frozen=True, slots=True)
class Arrival:
    tenant: str
    weight: float
    num_tokens: int
    """Number of uncached tokens of its prompt, as far as is known."""
    prompt: int
    """Hash of the prompt. With the tenant it identifies the request when it comes again."""
    limit_s: float
    """Seconds within which the first token is of use."""


Wait = Callable[[Queued], float]
"""Function that returns the seconds until the queued work has begun."""


@dataclass(frozen=True, slots=True)
class _Place:
    due: float
    num_tokens: int


class Overload:
    def __init__(self, counters: VirtualCounters) -> None:
        self._counters = counters
        self._places: dict[tuple[str, int], _Place] = {}
        self._kept: dict[str, Queued] = {}
        """Reserved work by tenant."""
        self._lapses: list[tuple[float, tuple[str, int]]] = []
        self._random = random.Random(0)  # spreads returns; nothing is secret
        self.kept = Queued()
        """Sum of all reservations."""

    def rest(self) -> None:
        """Drops all reservations, because nobody has been running or waiting for a while."""
        self._places.clear()
        self._kept.clear()
        self._lapses.clear()
        self.kept = Queued()

    def claim(self, tenant: str, prompt: int) -> None:
        """Ends the request's reservation, if it has one. It came, and there is capacity for it anyway."""
        if (tenant, prompt) in self._places:
            self._give_up((tenant, prompt))

    def refuse(self, arrival: Arrival, queued: Mapping[str, Queued], now: float, wait_s: Wait) -> float:
        """Returns the seconds after which the request is to come again, or 0 if it is let in. `queued` is the waiting
        work by tenant. O(tenants that wait)."""
        self._lapse(now)
        key = arrival.tenant, arrival.prompt
        place = self._places.get(key)
        if place is not None:
            self._give_up(key)
        on_time = place is not None and now >= place.due
        wait = wait_s(self._ahead(arrival, queued))
        if wait <= (SLACK if on_time else SHORT) * arrival.limit_s:
            return 0.0
        none = Queued()
        with_places = {
            tenant: queued.get(tenant, none).plus(self._kept.get(tenant, none))
            for tenant in queued.keys() | self._kept.keys()
        }
        wait = wait_s(self._ahead(arrival, with_places))
        if wait <= arrival.limit_s:
            return 0.0
        jitter = self._random.uniform(1 - JITTER, 1 + JITTER)
        after_s = (wait - arrival.limit_s + min(EARLY_S, arrival.limit_s / 2)) * jitter
        if after_s <= LONGEST_S:
            self._keep(key, _Place(now + after_s, arrival.num_tokens))
        return after_s

    def _ahead(self, arrival: Arrival, queued: Mapping[str, Queued]) -> Queued:
        counters = self._counters
        ahead = queued.get(arrival.tenant, Queued())
        level = counters.level(arrival.tenant)
        level += (ahead.num_tokens + arrival.num_tokens) / arrival.weight
        for tenant, theirs in queued.items():
            if tenant != arrival.tenant:
                until_level = (level - counters.level(tenant)) * counters.weight(tenant)
                ahead = ahead.plus(theirs, part=until_level / max(1.0, theirs.num_tokens))
        return ahead

    # --- reservations ---

    def _keep(self, key: tuple[str, int], place: _Place) -> None:
        self._places[key] = place
        self._count(key[0], place, 1)
        heapq.heappush(self._lapses, (place.due + GRACE_S, key))

    def _give_up(self, key: tuple[str, int]) -> None:
        self._count(key[0], self._places.pop(key), -1)

    def _count(self, tenant: str, place: _Place, sign: int) -> None:
        change = Queued(sign * place.num_tokens, sign)
        self.kept = self.kept.plus(change)
        kept = self._kept.get(tenant, Queued()).plus(change)
        if kept.num_sequences:
            self._kept[tenant] = kept
        else:
            del self._kept[tenant]

    def _lapse(self, now: float) -> None:
        while self._lapses and self._lapses[0][0] <= now:
            at, key = heapq.heappop(self._lapses)
            place = self._places.get(key)
            if place is not None and place.due + GRACE_S <= at:  # otherwise it is one of a later refusal
                self._give_up(key)
