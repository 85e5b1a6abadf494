"""Metric families of the queues, updated each second. The module knows no socket.

No family carries a tenant, because a series per tenant costs the operator memory. What fairness promises can be seen
without names: who waits, for how long, and how far the tenants that wait are apart. The oldest wait names the model,
because workers are scaled by it, model by model.
"""

from __future__ import annotations

from functools import partial

from prometheus_client import Counter, Gauge

from workers.engine.reports.families import Families
from workers.engine.values.queue_figures import QueueFigures, TierFigures


class QueueMetrics:
    def __init__(self, families: Families) -> None:
        registry, self._labels = families.registry, families.labels
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self._before = QueueFigures()
        self._running = gauge("headgate_running_sequences", "Sequences that hold blocks now.", ["tier"])
        self._waiting = gauge("headgate_waiting_sequences", "Sequences that wait for a step.", ["tier"])
        self._oldest = gauge(
            "headgate_oldest_wait_seconds",
            "Seconds for which the oldest request that never ran has waited.",
            [*families.labels, "tier"],
        )
        self._waiting_tenants = gauge("headgate_waiting_tenants", "Tenants with a request that never ran.", ["tier"])
        self._preemptions = counter(
            "headgate_preemptions",
            "Sequences that lost their blocks, by the cause and by their tier.",
            ["cause", "tier"],
        )
        self._tenants = gauge("headgate_active_tenants", "Tenants with a request in the worker.")
        self._spread = gauge(
            "headgate_tenant_counter_spread_tokens",
            "Largest difference between the counters of tenants that wait, in weighted tokens.",
        )

    def observe(self, now: QueueFigures) -> None:
        before, self._before = self._before, now
        for name, tier in now.tiers.items():
            self._running.labels(name).set(tier.num_running)
            self._waiting.labels(name).set(tier.num_waiting)
            self._oldest.labels(**self._labels, tier=name).set(tier.oldest_wait_s)
            self._waiting_tenants.labels(name).set(tier.num_tenants_waiting)
            earlier = before.tiers.get(name, TierFigures())
            for cause, number in tier.num_preempted.items():
                self._preemptions.labels(cause, name).inc(number - earlier.num_preempted[cause])
        self._tenants.set(len(now.tenants))
        self._spread.set(now.counter_spread)
