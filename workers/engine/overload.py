"""Whom to refuse because a first token would come too late, and when to say he may come again. Pure; the clock is given.

What stands before an arrival is what its tenant's fair share lets pass before it: its own tenant's queue, and of each
other tenant no more than until the counters are level. That, divided by the rate at which the queue drains, is the wait.

Whoever is refused is told when the wait will be short enough, and has a place kept until then: as if he stood in the
queue, so that those refused after him are told a later time and newcomers do not take his turn. He is known again by
his tenant and prompt. A place that is not claimed lapses. Otherwise a worker with more clients than it can serve would
tell all of them the same moment, and most of them in vain.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

from workers.engine.fairness import VirtualCounters

FADE_S = 5.0
"""The drain rate is that of about so long."""

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


class DrainRate:
    """Prompt tokens that leave the queue in a second in which there is one."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._at = -math.inf
        self._num_taken = 0

    def observe(self, now: float, num_taken: int, *, backlog: bool) -> None:
        """`num_taken`: tokens that left up to now. `backlog`: somebody waits."""
        elapsed = now - self._at
        if backlog and elapsed < FADE_S:
            fade = math.exp(-elapsed / FADE_S)
            self._tokens = self._tokens * fade + num_taken - self._num_taken
            self._seconds = self._seconds * fade + elapsed
        self._at, self._num_taken = now, num_taken

    def per_second(self, expected: float) -> float:
        """`expected` stands for one second, while little was seen. 0: nothing is known at all."""
        return (self._tokens + expected) / (self._seconds + 1) if expected > 0 else 0.0


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


@dataclass(frozen=True, slots=True)
class _Place:
    due: float
    num_tokens: int


class Overload:
    def __init__(self, counters: VirtualCounters) -> None:
        self.drain = DrainRate()
        self._counters = counters
        self._places: dict[tuple[str, int], _Place] = {}
        self._kept: dict[str, int] = {}
        """Tokens of places, by tenant."""
        self._lapses: list[tuple[float, tuple[str, int]]] = []
        self._random = random.Random(0)  # spreads returns; nothing is secret

    @property
    def num_kept(self) -> int:
        """Tokens of all places."""
        return sum(self._kept.values())

    def claim(self, tenant: str, prompt: int) -> None:
        """He came, and there is room anyway."""
        if (tenant, prompt) in self._places:
            self._give_up((tenant, prompt))

    def refuse(
        self, arrival: Arrival, queued: Mapping[str, int], num_running: int, now: float, rate: float
    ) -> float:
        """Seconds after which to come again; 0: welcome. `queued`: uncached tokens that wait, by tenant; `num_running`:
        those of prompts being computed; `rate`: tokens per second. O(tenants that wait)."""
        self._lapse(now)
        key = arrival.tenant, arrival.prompt
        place = self._places.get(key)
        if place is not None:
            self._give_up(key)
        if rate <= 0:
            return 0.0
        on_time = place is not None and now >= place.due
        wait = (self._ahead(arrival, queued) + num_running) / rate
        if wait <= (SLACK if on_time else SHORT) * arrival.limit_s:
            return 0.0
        tenants = queued.keys() | self._kept.keys()
        with_places = {t: queued.get(t, 0) + self._kept.get(t, 0) for t in tenants}
        wait = (self._ahead(arrival, with_places) + num_running) / rate
        if wait <= arrival.limit_s:
            return 0.0
        jitter = self._random.uniform(1 - JITTER, 1 + JITTER)
        # Half the target: a queue as long as the target would refuse whoever comes a moment early.
        after_s = (wait - arrival.limit_s / 2) * jitter
        if after_s <= LONGEST_S:
            self._keep(key, _Place(now + after_s, arrival.num_tokens))
        return after_s

    def _ahead(self, arrival: Arrival, queued: Mapping[str, int]) -> float:
        counters = self._counters
        own = queued.get(arrival.tenant, 0)
        level = counters.level(arrival.tenant) + (own + arrival.num_tokens) / arrival.weight
        ahead = float(own)
        for tenant, num_tokens in queued.items():
            if tenant != arrival.tenant:
                until_level = (level - counters.level(tenant)) * counters.weight(tenant)
                ahead += min(num_tokens, max(0.0, until_level))
        return ahead

    # --- places ---

    def _keep(self, key: tuple[str, int], place: _Place) -> None:
        self._places[key] = place
        self._kept[key[0]] = self._kept.get(key[0], 0) + place.num_tokens
        heapq.heappush(self._lapses, (place.due + GRACE_S, key))

    def _give_up(self, key: tuple[str, int]) -> None:
        tenant = key[0]
        self._kept[tenant] -= self._places.pop(key).num_tokens
        if self._kept[tenant] == 0:
            del self._kept[tenant]

    def _lapse(self, now: float) -> None:
        while self._lapses and self._lapses[0][0] <= now:
            at, key = heapq.heappop(self._lapses)
            place = self._places.get(key)
            if place is not None and place.due + GRACE_S <= at:  # not one of a later refusal
                self._give_up(key)
