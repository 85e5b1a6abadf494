"""Choice of the next sequence among those of one tier that never ran: tenants by their counters, inside a tenant the
longest match.

A tenant that is chosen is served a quantum of tokens before another is, so that order by prefix has an effect. The
quantum ends early for a tenant that came, was not served yet and has no larger counter. Order by prefix never crosses
tenants (engine.md 2.7). Inside a tenant, prompts that miss the same block first form a group. A group is ordered by its
head's match, and a member is looked up when it becomes head, so a step costs the same with 5 or 5,000 waiting. Nobody
is overtaken for ever: an arrival goes first when its tenant has been served twice the tokens that were ahead of it, and
a quantum.

Order by prefix inside quanta of virtual token counters is D2LPM/DLPM, arXiv 2501.14312; the ageing is our own.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Set
from contextlib import closing
from typing import Protocol

from cache.tree.handle import BlockKey, Probe
from workers.engine.queueing.fairness import TenantOrder, VirtualCounters
from workers.engine.queueing.forecast import Queued
from workers.engine.queueing.sweeping import swept
from workers.engine.sequences.sequence import Sequence

MAX_PROBES = 32
"""Largest number of lookups of one choice. After them, the sequence looked up last is taken."""

QUANTUM_STEPS = 4
"""A quantum is this number of token budgets."""

Look = Callable[[Sequence], Probe]
Order = tuple[int, int]


class Waiting(Protocol):
    """The sequences of a tier that never ran, in the order in which they will."""

    num_uncached: int
    """Number of prompt tokens that are not computed yet, as far as is known."""

    def __len__(self) -> int: ...

    @property
    def queued(self) -> dict[str, Queued]:
        """Waiting work by tenant. O(tenants)."""
        ...

    def push(self, sequence: Sequence) -> None: ...

    def peek(self, waits: Callable[[Group], bool], without: Set[str] = frozenset()) -> Sequence | None:
        """Returns the next sequence that is of none of the tenants `without`. Where sequences may be overtaken, it is
        the first that `waits` does not hold back."""
        ...

    def take(self, sequence: Sequence) -> None:
        """Removes a sequence that is admitted, which `peek` returned last."""
        ...

    def remove(self, sequence: Sequence) -> int:
        """Removes a sequence that leaves, for any reason. Returns its uncached tokens. O(log waiting)."""
        ...

    def committed(self, keys: Iterable[BlockKey]) -> None:
        """Notes that these blocks are in the tree now."""
        ...


class Group:
    """Sequences of one tenant that (as far as is known) match equally far and miss the same block."""

    __slots__ = ("deferred_at", "entry", "members", "num_tokens", "order", "probe", "tenant")

    def __init__(self, tenant: str, probe: Probe) -> None:
        self.tenant = tenant
        self.probe = probe
        self.members: dict[Sequence, None] = {}
        self.order: list[tuple[Order, Sequence]] = []
        """A heap by arrival. Entries of sequences that left are skipped, and swept out."""
        self.num_tokens = 0
        self.entry: tuple[int, Order, Group] | None = None
        """Its live entry in the tenant's heap."""
        self.deferred_at = -1
        """Step since which it waits for a leader. The value is -1 if it does not wait."""

    def __lt__(self, other: Group) -> bool:  # two groups with one head do not exist
        return False

    @property
    def num_uncached(self) -> int:
        return self.num_tokens - self.probe.num_tokens * len(self.members)

    def add(self, sequence: Sequence) -> None:
        self.members[sequence] = None
        self.num_tokens += len(sequence.tokens)
        heapq.heappush(self.order, (sequence.order, sequence))

    def remove(self, sequence: Sequence) -> None:
        del self.members[sequence]
        self.num_tokens -= len(sequence.tokens)
        self.order = swept(self.order, len(self.members), lambda entry: entry[1] in self.members)

    @property
    def head(self) -> Sequence:
        while self.order[0][1] not in self.members:
            heapq.heappop(self.order)
        return self.order[0][1]


class TenantQueue:
    """The waiting sequences of one tenant. The caller's `waits(group)` tells which groups are passed over for now."""

    def __init__(self, tenant: str, look: Look, by_key: dict[BlockKey, list[Group]]) -> None:
        self.tenant = tenant
        self.num_uncached = 0
        self._look = look
        self._by_key = by_key
        self._group_of: dict[Sequence, Group] = {}
        self._open: dict[BlockKey, Group] = {}
        """Groups by the block that they miss. An arrival that misses the same block joins the group."""
        self._heap: list[tuple[int, Order, Group]] = []
        self._num_served = 0
        self._due: list[tuple[int, Order, Sequence]] = []
        """Heap of sequences by the number of served tokens of the tenant at which they go first."""

    def __len__(self) -> int:
        return len(self._group_of)

    def push(self, sequence: Sequence, quantum: int) -> None:
        ahead = self.num_uncached
        self._join(sequence, self._look(sequence))
        heapq.heappush(self._due, (self._num_served + 2 * ahead + quantum, sequence.order, sequence))

    def remove(self, sequence: Sequence) -> int:
        """Removes a sequence and returns its uncached tokens, as far as is known."""
        group = self._group_of.pop(sequence)
        num_uncached = len(sequence.tokens) - group.probe.num_tokens
        self._leave(group, sequence)
        self._sweep()
        return num_uncached

    def served(self, num_tokens: int) -> None:
        self._num_served += num_tokens

    def first(self, waits: Callable[[Group], bool]) -> Sequence | None:
        due = self._overdue()
        if due is not None and not waits(self._group_of[due]):
            return due
        passed: list[tuple[int, Order, Group]] = []
        found = None
        num_probes = 0
        while self._heap and found is None:
            entry = self._heap[0]
            group = entry[2]
            if group.entry is not entry:
                heapq.heappop(self._heap)
                continue
            num_probes += 1
            sequence = group.head
            if self._look_again(sequence, group) and num_probes < MAX_PROBES:
                continue
            if waits(self._group_of[sequence]):
                self._pass_over(passed)
            else:
                found = sequence
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return found

    def committed(self, group: Group) -> None:
        """Moves the group to the match that its head has now, because the block that it missed is in the tree."""
        self._restate(group, self._look(group.head))

    def _pass_over(self, passed: list[tuple[int, Order, Group]]) -> None:
        entry = heapq.heappop(self._heap)
        if entry[2].entry is entry:
            passed.append(entry)

    def _overdue(self) -> Sequence | None:
        while self._due:
            at, _, sequence = self._due[0]
            if sequence in self._group_of:
                return sequence if at <= self._num_served else None
            heapq.heappop(self._due)
        return None

    def _look_again(self, sequence: Sequence, group: Group) -> bool:
        """Looks the sequence up again. Returns True if its match is not the group's."""
        probe = self._look(sequence)
        if probe == group.probe:
            return False
        if len(group.members) == 1:
            self._restate(group, probe)
        else:
            self._leave(group, sequence)
            self._join(sequence, probe)
        return True

    def _join(self, sequence: Sequence, probe: Probe) -> None:
        group = None if probe.next_key is None else self._open.get(probe.next_key)
        if group is None or group.probe != probe:
            group = Group(self.tenant, probe)
            self._index(group)
        else:
            self.num_uncached -= group.num_uncached
        group.add(sequence)
        self._group_of[sequence] = group
        self.num_uncached += group.num_uncached
        self._enter(group)

    def _leave(self, group: Group, sequence: Sequence) -> None:
        self.num_uncached -= group.num_uncached
        group.remove(sequence)
        self.num_uncached += group.num_uncached
        if group.members:
            self._enter(group)
        else:
            group.entry = None
            self._unindex(group)

    def _restate(self, group: Group, probe: Probe) -> None:
        self._unindex(group)
        self.num_uncached -= group.num_uncached
        group.probe = probe
        group.deferred_at = -1
        self.num_uncached += group.num_uncached
        self._index(group)
        self._enter(group)

    def _enter(self, group: Group) -> None:
        head = group.head.order
        if group.entry is None or group.entry[:2] != (-group.probe.num_tokens, head):
            group.entry = (-group.probe.num_tokens, head, group)
            heapq.heappush(self._heap, group.entry)
            self._sweep()

    def _sweep(self) -> None:
        self._heap = swept(self._heap, len(self), lambda entry: entry[2].entry is entry)
        self._due = swept(self._due, len(self), lambda entry: entry[2] in self._group_of)

    def _index(self, group: Group) -> None:
        key = group.probe.next_key
        if key is not None:
            self._open[key] = group
            self._by_key.setdefault(key, []).append(group)

    def _unindex(self, group: Group) -> None:
        key = group.probe.next_key
        if key is None:
            return
        groups = self._by_key[key]
        groups.remove(group)
        if not groups:
            del self._by_key[key]
        if self._open.get(key) is group:
            del self._open[key]


class WaitingQueue:
    """The waiting sequences of one tier, in fair shares of its tenants."""

    def __init__(self, counters: VirtualCounters, look: Look, budget: Callable[[], int]) -> None:
        self.num_uncached = 0
        self._counters = counters
        self._look = look
        self._budget = budget
        self._tenants: dict[str, TenantQueue] = {}
        self._order = TenantOrder(counters)
        self._newcomers = TenantOrder(counters)
        """The tenants that have not been served since they came."""
        self._by_key: dict[BlockKey, list[Group]] = {}
        self._chosen: TenantQueue | None = None
        self._quantum_left = 0
        self._is_passing = False
        """Whether the choice made last left out tenants whose turn it may be. It begins no quantum."""
        self._num_items = 0

    def __len__(self) -> int:
        return self._num_items

    @property
    def queued(self) -> dict[str, Queued]:
        return {tenant: Queued(queue.num_uncached, len(queue)) for tenant, queue in self._tenants.items()}

    def push(self, sequence: Sequence) -> None:
        tenant = sequence.attempt.message.tenant
        queue = self._tenants.get(tenant)
        if queue is None:
            queue = self._tenants[tenant] = TenantQueue(tenant, self._look, self._by_key)
            self._order.add(tenant)
            self._newcomers.add(tenant)
        with _Counted(self, queue):
            queue.push(sequence, self._quantum)
        self._num_items += 1

    def peek(self, waits: Callable[[Group], bool], without: Set[str] = frozenset()) -> Sequence | None:
        self._is_passing = bool(without)
        chosen = self._chosen if self._chosen is None or self._chosen.tenant not in without else None
        if chosen is not None and self._quantum_left > 0 and not self._is_overtaken(chosen):
            sequence = self._first(chosen, waits)
            if sequence is not None:
                return sequence
        with closing(self._order.smallest_first()) as tenants:
            for tenant in tenants:
                if tenant in without:
                    continue
                queue = self._tenants[tenant]
                sequence = self._first(queue, waits)
                if sequence is not None:
                    return sequence
        return None

    def take(self, sequence: Sequence) -> None:
        queue = self._tenants[sequence.attempt.message.tenant]
        num_uncached = self.remove(sequence)
        queue.served(num_uncached)
        if not queue:
            return
        self._order.served(queue.tenant)
        self._newcomers.discard(queue.tenant)
        if self._is_passing:
            return
        if queue is not self._chosen or self._quantum_left <= 0:
            self._chosen, self._quantum_left = queue, self._quantum
        self._quantum_left -= max(1, num_uncached)

    def remove(self, sequence: Sequence) -> int:
        tenant = sequence.attempt.message.tenant
        queue = self._tenants[tenant]
        with _Counted(self, queue):
            num_uncached = queue.remove(sequence)
        self._num_items -= 1
        if not queue:
            del self._tenants[tenant]
            self._order.discard(tenant)
            self._newcomers.discard(tenant)
            if queue is self._chosen:
                self._chosen = None
        return num_uncached

    def committed(self, keys: Iterable[BlockKey]) -> None:
        """Regroups the sequences that missed one of these blocks. O(keys + groups that missed one of them)."""
        if not self._by_key:
            return
        for key in keys:
            for group in tuple(self._by_key.get(key, ())):
                queue = self._tenants[group.tenant]
                with _Counted(self, queue):
                    queue.committed(group)

    def _is_overtaken(self, chosen: TenantQueue) -> bool:
        with closing(self._newcomers.smallest_first()) as tenants:
            newcomer = next(tenants, None)
        return newcomer is not None and self._counters[newcomer] <= self._counters[chosen.tenant]

    @property
    def _quantum(self) -> int:
        return QUANTUM_STEPS * self._budget()

    def _first(self, queue: TenantQueue, waits: Callable[[Group], bool]) -> Sequence | None:
        with _Counted(self, queue):
            return queue.first(waits)


class _Counted:
    """Context that adds the change of a tenant's sum of uncached tokens to the sum over all tenants."""

    __slots__ = ("_before", "_queue", "_whole")

    def __init__(self, whole: WaitingQueue, queue: TenantQueue) -> None:
        self._whole, self._queue = whole, queue
        self._before = queue.num_uncached

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._whole.num_uncached += self._queue.num_uncached - self._before
