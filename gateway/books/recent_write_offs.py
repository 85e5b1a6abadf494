"""The tokens that were written off lately, by tenant and reason, summed by the hour, so that each minute reads only its own rows.

The module is pure. It holds the tenants of whom anything was written off in the hours that are judged, and no others.
"""

from __future__ import annotations

from collections import Counter

from accounting.ledger.write_off_sums import Sums

HOUR_MS = 3_600_000


class RecentWriteOffs:
    def __init__(self) -> None:
        self._hours: dict[int, Counter[tuple[str, str]]] = {}

    def add(self, since_ms: int, found: Sums) -> None:
        """Adds what was written off in a span, which counts to the hour in which it begins."""
        self._hours.setdefault(since_ms - since_ms % HOUR_MS, Counter()).update(found)

    def since(self, start_ms: int) -> Sums:
        """Forgets the hours that began earlier, and returns the sums of the others."""
        self._hours = {hour_ms: sums for hour_ms, sums in self._hours.items() if hour_ms >= start_ms}
        total = Counter[tuple[str, str]]()
        for sums in self._hours.values():
            total.update(sums)
        return total
