"""The owners of slots in the host tier: how many slots each tenant has, which tenant has the most, and which copy of a
tenant goes first.

The module knows counts, and copies by their use. It knows neither the trie nor which slots there are. A tenant without
slots and without a quota is forgotten, so nothing here grows with the number of tenants that ever wrote.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cache.host.tiers import HostBlock

UNLIMITED = 1 << 62
_SLACK = 64
"""The number of stale entries that a heap may hold in addition to as many as it has live ones."""


class Owner:
    """A tenant that has slots or a quota."""

    __slots__ = ("_queue", "name", "num_copies", "num_swapped", "quota")

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_copies = 0
        self.num_swapped = 0
        """The number of slots with blocks of its preempted sequences."""
        self.quota = UNLIMITED
        self._queue: list[tuple[int, HostBlock]] = []

    @property
    def num_slots(self) -> int:
        return self.num_copies + self.num_swapped

    def queue(self, copy: HostBlock) -> None:
        """Queues a copy that is free to go. It may be used again, read, or get children while it is queued. O(log
        copies)."""
        if not copy.queued:
            copy.queued = True
            heapq.heappush(self._queue, (copy.used, copy))
            if len(self._queue) > 2 * self.num_copies + _SLACK:
                self._rebuild()

    def coldest(self) -> HostBlock | None:
        """Returns the copy that was free to go for the longest, or None. A copy that is found to be in use leaves the
        queue and comes back when it is free again. Amortised O(log copies)."""
        while self._queue:
            used, copy = self._queue[0]
            if copy.gone or not copy.is_free_to_go:
                heapq.heappop(self._queue)
                copy.queued = False
            elif used != copy.used:
                heapq.heapreplace(self._queue, (copy.used, copy))
            else:
                return copy
        return None

    def _rebuild(self) -> None:
        """Makes the queue anew without the copies that are gone."""
        for _, copy in self._queue:
            copy.queued = not copy.gone
        self._queue = [(copy.used, copy) for _, copy in self._queue if copy.queued]
        heapq.heapify(self._queue)


class Owners:
    """All tenants that have slots or a quota. The heap over their counts is updated when the largest is asked for, for
    those that changed since: without pressure a change costs an entry in a set."""

    def __init__(self) -> None:
        self._owners: dict[str, Owner] = {}
        self._by_size: list[tuple[int, str]] = []
        self._changed: set[str] = set()

    def __len__(self) -> int:
        return len(self._owners)

    def of(self, name: str) -> Owner:
        """Returns the tenant. An unknown one is returned empty and not stored."""
        return self._owners.get(name) or Owner(name)

    def add(self, name: str, copies: int = 0, swapped: int = 0) -> None:
        """Changes the tenant's counts. O(1)."""
        owner = self._kept(name)
        owner.num_copies += copies
        owner.num_swapped += swapped
        assert owner.num_copies >= 0 and owner.num_swapped >= 0, name
        self._changed.add(name)
        self._forget(owner)

    def set_quota(self, name: str, quota: int) -> None:
        owner = self._kept(name)
        owner.quota = quota
        self._forget(owner)

    def largest(self) -> Owner:
        """Returns the tenant with the most slots; among equals the first by name. Amortised O(log tenants) for each
        change."""
        for name in self._changed:
            if owner := self._owners.get(name):
                heapq.heappush(self._by_size, (-owner.num_slots, name))
        self._changed.clear()
        if len(self._by_size) > 2 * len(self._owners) + _SLACK:
            self._by_size = [(-owner.num_slots, name) for name, owner in self._owners.items()]
            heapq.heapify(self._by_size)
        while self._by_size:
            size, name = self._by_size[0]
            owner = self.of(name)
            if owner.num_slots == -size:
                return owner
            heapq.heappop(self._by_size)
        return Owner("")

    def _kept(self, name: str) -> Owner:
        owner = self._owners.get(name)
        if owner is None:
            owner = self._owners[name] = Owner(name)
        return owner

    def _forget(self, owner: Owner) -> None:
        if not owner.num_slots and owner.quota == UNLIMITED:
            del self._owners[owner.name]
            self._changed.discard(owner.name)

    def broken(self, copies: Counter[str], swapped: Counter[str]) -> Iterator[str]:
        """Checks law 11: yields a sentence for each difference between the counts here and the given ones."""
        for name in {*self._owners, *copies, *swapped}:
            mine = self.of(name)
            if (mine.num_copies, mine.num_swapped) != (copies[name], swapped[name]):
                yield f"(11) {name!r} has {copies[name]} copies and {swapped[name]} swapped blocks"
            if name in self._owners and not mine.num_slots and mine.quota == UNLIMITED:
                yield f"(11) {name!r} has nothing and is remembered"
