"""A fair queue over tenants for work before any limit counts it, in units, so that a flood waits only for itself.

It uses start-time fair queueing (Goyal, Vin and Cheng, 1996) with equal shares: the tenant that has been served less is
next, and a tenant that comes anew starts level with the others, with no credit for its absence. The module is pure.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_REMEMBERED = 1024
"""The most tenants that are remembered because they do not wait and are still ahead of the others."""


class FairQueue(Generic[T]):
    def __init__(self) -> None:
        self._waiting: dict[str, deque[tuple[int, T]]] = {}
        self._had: dict[str, int] = {}
        """Tenant → the units that it has been served, counted from its virtual start."""
        self._now = 0
        """The virtual time: the count of the tenant that was served last."""

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def num_units(self) -> int:
        return sum(units for waiting in self._waiting.values() for units, _ in waiting)

    def push(self, tenant: str, units: int, item: T) -> None:
        if tenant not in self._waiting:
            self._waiting[tenant] = deque()
            self._had[tenant] = max(self._had.get(tenant, 0), self._now)
        self._waiting[tenant].append((units, item))

    def pop(self, most_units: int | None = None) -> T | None:
        """Removes and returns the next item of at most `most_units`; None if no tenant's next item is that small.
        O(waiting tenants).
        """
        able = [
            tenant for tenant, waiting in self._waiting.items() if most_units is None or waiting[0][0] <= most_units
        ]
        if not able:
            return None
        tenant = min(able, key=self._had.__getitem__)
        units, item = self._waiting[tenant].popleft()
        self._now = max(self._now, self._had[tenant])
        self._had[tenant] += units
        self._leave_if_done(tenant)
        return item

    def remove(self, tenant: str, item: T) -> None:
        """Removes an item that no caller waits for any more; it costs its tenant nothing. O(the tenant's items)."""
        waiting = self._waiting.get(tenant, deque())
        found = next((entry for entry in waiting if entry[1] is item), None)
        if found is not None:
            waiting.remove(found)
            self._leave_if_done(tenant)

    def _leave_if_done(self, tenant: str) -> None:
        if not self._waiting[tenant]:
            del self._waiting[tenant]
        if not self._waiting:
            self._had, self._now = {}, 0  # no tenant waits, so nothing has to be remembered
        elif len(self._had) > len(self._waiting) + MAX_REMEMBERED:
            self._had = {name: had for name, had in self._had.items() if name in self._waiting or had > self._now}
