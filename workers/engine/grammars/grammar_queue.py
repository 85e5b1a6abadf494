"""Grammars that wait to be compiled, and the choice of the next one. The module is pure; the clock is given, and the
caller holds the lock.

The next grammar is of the tenant whose grammars recently took the least time. So a tenant whose grammars are compiled
until a limit ends the compiler waits for everybody else. A grammar that nobody waits for any more leaves the queue, and
the number of a tenant's grammars in the queue is bounded.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass

from workers.engine.grammars.grammar import Key
from workers.engine.grammars.library import GrammarError

MAX_GRAMMARS = 64
"""Largest number of waiting grammars of one tenant."""
FADE_S = 60.0
"""Seconds after which used compile time counts about a third (1/e)."""
LEAST_S = 1e-3
"""Seconds of recent compile time below which a tenant is forgotten."""


class GrammarsWait(GrammarError):
    """The grammar is not compiled now, which says nothing about it: the tenant has as many grammars in the queue as it
    may have, or the compiler failed. The tenant may try again later."""


@dataclass(frozen=True, slots=True)
class Job:
    key: Key
    text: str


class GrammarQueue:
    def __init__(self) -> None:
        self._jobs: OrderedDict[str, deque[Job]] = OrderedDict()
        """Waiting jobs by tenant, in the order in which they came."""
        self._taken: dict[str, tuple[float, float]] = {}
        """Map from tenant to (recent seconds, time at which they were counted)."""

    def __len__(self) -> int:
        return sum(map(len, self._jobs.values()))

    def push(self, job: Job) -> None:
        """Adds a job. Raises `GrammarsWait`."""
        jobs = self._jobs.get(job.key[0], deque())
        if len(jobs) >= MAX_GRAMMARS:
            raise GrammarsWait("too many grammars of this tenant wait to be compiled")
        jobs.append(job)
        self._jobs[job.key[0]] = jobs

    def drop(self, key: Key) -> bool:
        """Removes a grammar that nobody waits for any more. Returns False if it is not in the queue."""
        jobs = self._jobs.get(key[0], deque())
        left = deque(job for job in jobs if job.key != key)
        if len(left) == len(jobs):
            return False
        self._keep(key[0], left)
        return True

    def pop(self, now: float) -> Job:
        """Returns the next job. The queue must not be empty."""
        tenant = min(self._jobs, key=lambda one: self._seconds(one, now))
        jobs = self._jobs[tenant]
        job = jobs.popleft()
        self._keep(tenant, jobs)
        return job

    def took(self, tenant: str, seconds: float, now: float) -> None:
        """Records that a grammar of this tenant had the compiler for `seconds`."""
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
