"""Metric families of the use of blocks by running sequences, updated each second. The module knows no socket."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge

from workers.engine.reports.occupancy import Occupancy


class OccupancyMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._sharing = Gauge(
            "headgate_sharing_blocks",
            "Blocks of requests with several choices: held now, and what they would hold without sharing.",
            ["mode", "kind"],
            registry=registry,
        )
        self._slots = Gauge(
            "headgate_kv_slots",
            "Token slots in the blocks of running sequences: allocated, and in use.",
            ["kind"],
            registry=registry,
        )

    def observe(self, found: Occupancy) -> None:
        for mode, shared in found.shared.items():
            self._sharing.labels(mode, "held").set(shared.num_held)
            self._sharing.labels(mode, "unshared").set(shared.num_unshared)
        self._slots.labels("allocated").set(found.num_slots)
        self._slots.labels("used").set(found.num_used)
