"""Separate steps for the attempts of a step that failed, until it is known whose row made it fail. The module is pure;
the clock is given.

The attempts of a step that failed run again in two smaller steps. Each of those that fails is split in two again, until
one attempt fails alone: that is the one to blame, and only it ends. A draw is a function of seed and position, and its
KV is written again, so the others get the tokens that they would have got. This takes about 2 log2(attempts) steps for
each attempt to blame.

These steps take turns with steps of everybody else. For a while, so do the steps of a tenant that was to blame, so that
its next failing request fails alone. A tenant that sends failing requests therefore slows others to half of
their pace at most, however many it sends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from collections.abc import Sequence as Seq
from functools import partial

from workers.engine.sequences.sequence import Attempt, Sequence

SUSPECT_S = 60.0
"""Seconds for which a tenant that was to blame has its steps for itself."""

Takes = Callable[[Sequence], bool]
"""Test for the sequences that take part in a step."""


class Apart:
    def __init__(self) -> None:
        self._groups: deque[Set[Attempt]] = deque()
        self._suspects: dict[str, float] = {}
        """Map from tenant to the time at which its suspicion ends."""
        self._was_apart = False

    def failed(self, attempts: Seq[Attempt], now: float, *, alone: bool) -> Attempt | None:
        """Handles a failed step of these attempts, none of which counts. Returns the one to blame, or None if that is
        not known yet. `alone` says that nobody else had a row in it, not even a row that counts no more."""
        if len(attempts) == 1 and alone:
            return self._blame(attempts[0], now)
        # Attempts of a tenant are kept side by side: where it sent several failing requests, fewer steps fail.
        ordered = sorted(attempts, key=lambda a: (a.message.tenant, a.serial))
        half = len(ordered) // 2
        halves = (frozenset(ordered[half:]), frozenset(ordered[:half]))
        self._groups.extendleft(group for group in halves if group)
        return None

    def turns(self, now: float, running: Callable[[], Iterable[Sequence]]) -> Iterator[Takes | None]:
        """Yields tests for the sequences that may take the next step, in order. The caller goes on while the named
        sequences have nothing to compute. None means that all may take part. `running` returns the sequences of all
        tiers."""
        if self._suspects:
            self._suspects = {t: until for t, until in self._suspects.items() if until > now}
        if not (self._groups or self._suspects):
            yield None
            return
        first = not self._was_apart
        for self._was_apart in (first, not first):
            if self._was_apart:
                yield from self._apart(running)
            else:
                yield self._takes_others()

    def _apart(self, running: Callable[[], Iterable[Sequence]]) -> Iterator[Takes]:
        while self._groups:
            yield partial(_is_of, self._groups.popleft())
        for tenant in [t for t in self._suspects if t in {_tenant(s) for s in running()}]:
            # A tenant that was served goes to the end.
            self._suspects[tenant] = self._suspects.pop(tenant)
            yield partial(_is_tenants, tenant)

    def _takes_others(self) -> Takes:
        grouped = frozenset[Attempt]().union(*self._groups)
        suspects = self._suspects
        return lambda sequence: sequence.attempt not in grouped and _tenant(sequence) not in suspects

    def _blame(self, attempt: Attempt, now: float) -> Attempt:
        """Suspects the attempt's tenant. Its other attempts leave the groups, because they run apart from other tenants
        anyway."""
        tenant = attempt.message.tenant
        self._suspects[tenant] = now + SUSPECT_S
        left = ({a for a in group if a.message.tenant != tenant} for group in self._groups)
        self._groups = deque(group for group in left if group)
        return attempt


def _tenant(sequence: Sequence) -> str:
    return sequence.attempt.message.tenant


def _is_of(group: Set[Attempt], sequence: Sequence) -> bool:
    return sequence.attempt in group


def _is_tenants(tenant: str, sequence: Sequence) -> bool:
    return _tenant(sequence) == tenant
