"""Grammars that wait to be compiled, and whose is next. Pure; the clock is given, and the caller holds the lock.

Next is the tenant whose grammars took the least time of late: whoever sends grammars that are compiled until a limit ends
the compiler waits behind everybody else. What nobody waits for any more leaves the queue, and a tenant has only so many.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass

from workers.engine.grammars.grammar import GrammarError, Key

MAX_JOBS = 64
"""Of one tenant."""
FADE_S = 60.0
"""Time that was taken counts a third after so long."""
LEAST_S = 1e-3
"""A tenant that took less of late is forgotten."""


class GrammarsWait(GrammarError):
    """The tenant has as many grammars in the queue as it may; later there is room."""


@dataclass(frozen=True, slots=True)
class Job:
    key: Key
    text: str


class GrammarQueue:
    def __init__(self) -> None:
        self._jobs: OrderedDict[str, deque[Job]] = OrderedDict()
        """By tenant, in the order in which they came."""
        self._taken: dict[str, tuple[float, float]] = {}
        """Tenant -> seconds, and when they were counted."""

    def __len__(self) -> int:
        return sum(map(len, self._jobs.values()))

    def push(self, job: Job) -> None:
        """Raises `GrammarsWait`."""
        jobs = self._jobs.get(job.key[0], deque())
        if len(jobs) >= MAX_JOBS:
            raise GrammarsWait("too many grammars of this tenant wait to be compiled")
        jobs.append(job)
        self._jobs[job.key[0]] = jobs

    def drop(self, key: Key) -> bool:
        """Nobody waits for it any more. False: it is not in the queue."""
        jobs = self._jobs.get(key[0], deque())
        left = deque(job for job in jobs if job.key != key)
        if len(left) == len(jobs):
            return False
        self._keep(key[0], left)
        return True

    def pop(self, now: float) -> Job:
        """The next one; there is one."""
        tenant = min(self._jobs, key=lambda one: self._seconds(one, now))
        jobs = self._jobs[tenant]
        job = jobs.popleft()
        self._keep(tenant, jobs)
        return job

    def took(self, tenant: str, seconds: float, now: float) -> None:
        """A grammar of this tenant had the compiler for so long."""
        taken = {one: (self._seconds(one, now), now) for one in self._taken}
        taken[tenant] = (self._seconds(tenant, now) + seconds, now)
        self._taken = {one: entry for one, entry in taken.items() if entry[0] >= LEAST_S}

    def _keep(self, tenant: str, jobs: deque[Job]) -> None:
        if jobs:
            self._jobs[tenant] = jobs
        else:
            del self._jobs[tenant]

    def _seconds(self, tenant: str, now: float) -> float:
        seconds, at = self._taken.get(tenant, (0.0, now))
        return seconds * math.exp((at - now) / FADE_S)
