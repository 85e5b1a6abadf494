"""Whom to refuse because a first token would come too late, and when to say he may come again. Pure; the clock is given.

What stands before an arrival is what its tenant's fair share lets pass before it: its own tenant's queue, and of each
other tenant no more than until the counters are level. How long that takes is forecast (forecast.py).

Whoever is refused is told when the wait will be short enough, and has a place kept until then: as if he stood in the
queue, so that those refused after him are told a later time and newcomers do not take his turn. He is known again by
his tenant and prompt. A place that is not claimed lapses. Otherwise a worker with more clients than it can serve would
tell all of them the same moment, and most of them in vain. A worker that rests has room for everybody: the times that it
told were too late, and it keeps no places.
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
"""A place is kept so long after the time that was told."""

LONGEST_S = 120.0
"""Told to come later than this, clients do not come again: no place is kept."""

SHORT = 0.25
"""Of the target: with a real queue as short as that anybody is let in, or places of those who never come would keep
the device idle."""

SLACK = 1.25
"""Who comes at the time he was told is let in though the wait is so much longer than the target."""

EARLY_S = 5.0
"""Whoever is refused is told when the wait will be so much shorter than the target, or half of it: with a queue just as
long as the target, whoever comes a moment early would be refused again."""


@dataclass(frozen=True, slots=True)
class Arrival:
    tenant: str
    weight: float
    num_tokens: int
    """Uncached ones of its prompt, as far as is known."""
    prompt: int
    """Its hash: with the tenant, who it is when it comes again."""
    limit_s: float
    """Until when the first token is of use."""


Wait = Callable[[Queued], float]
"""Seconds until those have begun."""


@dataclass(frozen=True, slots=True)
class _Place:
    due: float
    num_tokens: int


class Overload:
    def __init__(self, counters: VirtualCounters) -> None:
        self._counters = counters
        self._places: dict[tuple[str, int], _Place] = {}
        self._kept: dict[str, Queued] = {}
        """By tenant."""
        self._lapses: list[tuple[float, tuple[str, int]]] = []
        self._random = random.Random(0)  # spreads returns; nothing is secret
        self.kept = Queued()
        """All places."""

    def rest(self) -> None:
        """Nobody runs or waits, and so for a while."""
        self._places.clear()
        self._kept.clear()
        self._lapses.clear()
        self.kept = Queued()

    def claim(self, tenant: str, prompt: int) -> None:
        """He came, and there is room anyway."""
        if (tenant, prompt) in self._places:
            self._give_up((tenant, prompt))

    def refuse(self, arrival: Arrival, queued: Mapping[str, Queued], now: float, wait_s: Wait) -> float:
        """Seconds after which to come again; 0: welcome. `queued`: those that wait, by tenant. O(tenants that wait)."""
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

    # --- places ---

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
            if place is not None and place.due + GRACE_S <= at:  # not one of a later refusal
                self._give_up(key)
