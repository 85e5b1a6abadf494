"""The bytes that the cache kept for each tenant, hour by hour, in byte-milliseconds. A gateway charges for them if a
price says so.

The module is pure, and is given the cache's own integrals once a second. The sums of an hour only rise, so a report may
be repeated, lost or overtaken. If a process dies, at most its last minute is lost, and nobody is ever charged for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cache.blocks.usage import TenantBlocks
from workers.protocol.counts import ResidencyReport, TenantHour

HOUR_S = 3_600
REPORT_EVERY_S = 60.0
TOLD_FOR_S = 900
"""Seconds after its end for which an hour is still reported."""
MAX_ROWS = 1_000
"""Largest number of rows in one frame."""


@dataclass(slots=True)
class _Kept:
    cache_block_ms: int = 0
    pinned_block_ms: int = 0


class ResidencyMeter:
    def __init__(self, process: str, model: str, bytes_per_block: int) -> None:
        self._process = process
        self._model = model
        self._bytes_per_block = bytes_per_block
        self._before: dict[str, TenantBlocks] = {}
        self._hours: defaultdict[int, defaultdict[str, _Kept]] = defaultdict(lambda: defaultdict(_Kept))

    def observe(self, tenants: Mapping[str, TenantBlocks], now_s: float) -> None:
        """Adds what was kept since the last call. `tenants` has the integrals since each of them began; one that is not
        among them has not changed. An interval that crosses an hour counts for the later hour."""
        hour = int(now_s) // HOUR_S * HOUR_S
        for tenant, now in tenants.items():
            before = self._before.pop(tenant, TenantBlocks())
            if not now.is_over:
                self._before[tenant] = now
            pinned = now.pinned_block_ms - before.pinned_block_ms
            all_of_it = _block_ms(now) - _block_ms(before)
            if all_of_it:
                kept = self._hours[hour][tenant]
                kept.cache_block_ms += all_of_it - pinned
                kept.pinned_block_ms += pinned
        for past in [one for one in self._hours if one + HOUR_S + TOLD_FOR_S < now_s]:
            del self._hours[past]

    def reports(self) -> Iterator[ResidencyReport]:
        rows = [
            TenantHour(
                hour, tenant, kept.cache_block_ms * self._bytes_per_block, kept.pinned_block_ms * self._bytes_per_block
            )
            for hour, tenants in sorted(self._hours.items())
            for tenant, kept in sorted(tenants.items())
        ]
        for start in range(0, len(rows), MAX_ROWS):
            some = tuple(rows[start : start + MAX_ROWS])
            yield ResidencyReport(self._process, self._model, some)


def _block_ms(blocks: TenantBlocks) -> int:
    return blocks.held_block_ms + blocks.retained_block_ms
