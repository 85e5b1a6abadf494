"""Who runs apart: after a step failed, until it is known whose row it was. Pure; the clock is given.

The attempts of a step that failed run again in two smaller steps, each of those that fails in two smaller ones, until one
fails alone: that is the one to blame, and only it ends. A draw is a function of seed and position, and its KV is written
again, so the others get the tokens that they would have got. This takes about 2 log2(attempts) steps for each to blame.

Those steps take turns with steps of everybody else, and so do, for a while, those of a tenant that was to blame: what
it sends next fails beside nobody. So whoever sends requests that fail slows others to half of their pace, no further,
however many he sends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from collections.abc import Sequence as Seq
from functools import partial

from workers.engine.sequences.sequence import Attempt, Sequence

SUSPECT_S = 60.0
"""A tenant that was to blame has its steps for itself for so long."""

Takes = Callable[[Sequence], bool]
"""Whether a turn is this sequence's."""


class Apart:
    def __init__(self) -> None:
        self._groups: deque[Set[Attempt]] = deque()
        self._suspects: dict[str, float] = {}
        """Tenant -> until when."""
        self._was_apart = False

    def failed(self, attempts: Seq[Attempt], now: float, *, alone: bool) -> Attempt | None:
        """A step of these failed, and none of it counts. The one to blame; None: that is to be seen. `alone`: nobody
        else had a row in it, not even one that counts no more."""
        if len(attempts) == 1 and alone:
            return self._blame(attempts[0], now)
        # A tenant's own side by side: where it sent several of a kind, fewer steps fail.
        ordered = sorted(attempts, key=lambda a: (a.message.tenant, a.serial))
        half = len(ordered) // 2
        halves = (frozenset(ordered[half:]), frozenset(ordered[:half]))
        self._groups.extendleft(group for group in halves if group)
        return None

    def turns(self, now: float, running: Callable[[], Iterable[Sequence]]) -> Iterator[Takes | None]:
        """Whose turn it is, in order: a caller goes on while whoever is named has nothing to compute. None: everybody's.
        `running`: of all tiers."""
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
            # Who was served goes behind the others.
            self._suspects[tenant] = self._suspects.pop(tenant)
            yield partial(_is_tenants, tenant)

    def _takes_others(self) -> Takes:
        grouped = frozenset[Attempt]().union(*self._groups)
        suspects = self._suspects
        return lambda sequence: sequence.attempt not in grouped and _tenant(sequence) not in suspects

    def _blame(self, attempt: Attempt, now: float) -> Attempt:
        """Others of its tenant need not be looked for among strangers any more."""
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
