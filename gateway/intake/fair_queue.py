"""Whose turn it is: work of tenants before any limit knows of it, in units, so that a flood waits behind itself alone.

Start-time fair queueing (Goyal, Vin and Cheng, 1996) with equal shares: a tenant that has had less is next, and one
that comes anew stands where the others are now, with no credit for having been away. Pure.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_REMEMBERED = 1024
"""Tenants that do not wait and still stand ahead of the others."""


class FairQueue(Generic[T]):
    def __init__(self) -> None:
        self._waiting: dict[str, deque[tuple[int, T]]] = {}
        self._had: dict[str, int] = {}
        """Units that a tenant has had, counted from where it came in."""
        self._now = 0
        """Where the tenant stood that was served last."""

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
        """The next item that takes no more than `most_units`; None: nobody's next does. O(tenants that wait)."""
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
        """One that nobody waits for any more; it costs its tenant nothing. O(the tenant's items)."""
        waiting = self._waiting.get(tenant, deque())
        found = next((entry for entry in waiting if entry[1] is item), None)
        if found is not None:
            waiting.remove(found)
            self._leave_if_done(tenant)

    def _leave_if_done(self, tenant: str) -> None:
        if not self._waiting[tenant]:
            del self._waiting[tenant]
        if not self._waiting:
            self._had, self._now = {}, 0  # nobody was kept waiting by anybody
        elif len(self._had) > len(self._waiting) + MAX_REMEMBERED:
            self._had = {name: had for name, had in self._had.items() if name in self._waiting or had > self._now}
