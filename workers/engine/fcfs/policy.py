"""First come, first served: the baseline that fairness is measured against. It is also an oracle for tests: the order
decides when a token is computed, never which one.

The policy knows tiers, interactive before batch, and no tenants. Of a tier the earliest arrival is admitted first, is
dealt its chunk first, and loses its blocks last. There is no order by prefix. Nobody waits for a prefix that another
sequence computes, because a sequence that waits is overtaken. Tenants are charged all the same, for the figures.
Namespaces, floors and quotas of the cache do not depend on the order and stay.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Set
from functools import reduce

from cache.tree.handle import BlockKey
from workers.engine.queueing.fairness import VirtualCounters
from workers.engine.queueing.forecast import Queued
from workers.engine.queueing.overload import Arrival, Overload
from workers.engine.queueing.sweeping import swept
from workers.engine.queueing.waiting import Group, Look, Order
from workers.engine.scheduling.admission import Admission
from workers.engine.scheduling.chunks import Chunks
from workers.engine.scheduling.growth import Growth
from workers.engine.scheduling.policy import Policy
from workers.engine.scheduling.step_plan import StepPlan
from workers.engine.sequences.sequence import Sequence
from workers.protocol.messages import Tier

EVERYBODY = ""
"""Stand-in for the tenant, where there are no tenants."""


class ArrivalQueue:
    """Waiting sequences of one tier: a heap by arrival. A sequence that had to wait for a grammar keeps its
    position."""

    def __init__(self, counters: VirtualCounters, look: Look, budget: Callable[[], int]) -> None:
        self.num_uncached = 0
        self._look = look
        self._uncached: dict[Sequence, int] = {}
        """Number of uncached tokens of each sequence, as the tree was when it came."""
        self._heap: list[tuple[Order, Sequence]] = []
        """Heap by arrival. Entries of sequences that left are skipped, and swept out."""

    def __len__(self) -> int:
        return len(self._uncached)

    @property
    def queued(self) -> dict[str, Queued]:
        return {EVERYBODY: Queued(self.num_uncached, len(self))}

    def push(self, sequence: Sequence) -> None:
        num_uncached = len(sequence.tokens) - self._look(sequence).num_tokens
        self._uncached[sequence] = num_uncached
        self.num_uncached += num_uncached
        heapq.heappush(self._heap, (sequence.order, sequence))

    def peek(self, waits: Callable[[Group], bool], without: Set[str] = frozenset()) -> Sequence | None:
        while self._heap and self._heap[0][1] not in self._uncached:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def take(self, sequence: Sequence) -> None:
        self.remove(sequence)

    def remove(self, sequence: Sequence) -> int:
        num_uncached = self._uncached.pop(sequence)
        self.num_uncached -= num_uncached
        self._heap = swept(self._heap, len(self), lambda entry: entry[1] in self._uncached)
        return num_uncached

    def committed(self, keys: Iterable[BlockKey]) -> None:
        """Does nothing: no sequence's position depends on a prefix."""


class ArrivalAdmission(Admission):
    def _crowded(self, sequence: Sequence, prefills: list[Sequence]) -> bool:
        return True  # those before it take the whole step

    def _kept_for_newcomers(self, sequence: Sequence, running: list[Sequence]) -> int:
        return 0

    def _pass(self, head: Sequence, plan: StepPlan, crowd: list[Sequence] | None) -> Sequence | None:
        return None  # whoever came first is first


class ArrivalChunks(Chunks):
    def deal(self, plan: StepPlan, tier: Tier, prefills: list[Sequence]) -> None:
        """Deals each sequence all that it can use, one after the other."""
        for sequence in sorted(prefills, key=lambda s: s.order):
            if plan.budget == 0:
                return
            if sequence.attempt.is_whole:
                self._deal_whole(plan, sequence)
            else:
                self._deal_at_most(plan, sequence, plan.budget)


class ArrivalGrowth(Growth):
    def _sacrifice(self, sequence: Sequence) -> tuple[bool, float, Order]:
        return True, 0.0, sequence.order


class ArrivalOverload(Overload):
    def _ahead(self, arrival: Arrival, queued: Mapping[str, Queued]) -> Queued:
        return reduce(Queued.plus, queued.values(), Queued())


FIRST_COME = Policy(ArrivalQueue, ArrivalAdmission, ArrivalChunks, ArrivalGrowth, ArrivalOverload)
