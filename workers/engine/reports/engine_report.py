"""The report of a worker to gateways for its operator: the last steps, who has what, evictions, kernels and
recorded steps. The module is pure.

It is given what the engine thread reports once a step, and makes one value of it for each heartbeat.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from cache.blocks.usage import TenantBlocks
from workers.engine.reports.cache_watch import CacheFigures
from workers.engine.values.plan import GraphState, KernelState
from workers.engine.values.queue_figures import QueueFigures, TenantQueue
from workers.engine.values.record import StepRecord
from workers.protocol.reports import (
    MAX_REPORTED_STEPS,
    MAX_REPORTED_TENANTS,
    EngineReport,
    GraphReport,
    KernelReport,
    StepReport,
    TenantReport,
)


class EngineReporter:
    def __init__(self, kernels: Iterable[KernelState], graphs: Iterable[GraphState] = ()) -> None:
        self._kernels = tuple(KernelReport(one.op, one.implementation, one.state) for one in kernels)
        self._graphs = tuple(GraphReport(one.num_rows, one.state) for one in graphs)
        self._steps: deque[StepRecord] = deque(maxlen=MAX_REPORTED_STEPS)
        self._cache = CacheFigures()
        self._queues = QueueFigures()

    def observe(self, steps: Sequence[StepRecord], cache: CacheFigures | None, queues: QueueFigures | None) -> None:
        self._steps.extend(steps)
        self._cache = cache or self._cache
        self._queues = queues or self._queues

    def report(self, now: float) -> EngineReport:
        """Returns the report. `now` is the engine's clock, in seconds."""
        cache, queues = self._cache, self._queues
        return EngineReport(
            wait_ms=round(queues.wait_s * 1000),
            step_times=queues.step_times,
            cache_nodes=cache.num_nodes,
            pinned_blocks=cache.num_pinned_blocks,
            evicted_blocks=cache.evicted_blocks,
            kernels=self._kernels,
            graphs=self._graphs,
            steps=tuple(_step(one, now) for one in self._steps),
            tenants=_tenants(queues.tenants, cache.tenants),
        )


def _step(one: StepRecord, now: float) -> StepReport:
    return StepReport(
        one.step,
        max(0, round((now - one.collected_at) * 1000)),
        round(one.execute_s * 1_000_000),
        one.num_seqs,
        one.num_prefill_tokens,
        one.num_decode_seqs + one.num_proposed,
    )


def _tenants(queues: Mapping[str, TenantQueue], blocks: Mapping[str, TenantBlocks]) -> tuple[TenantReport, ...]:
    """Returns the tenants with most requests, then most blocks. O(tenants); few of them become values."""
    no_queue, no_blocks = TenantQueue(), TenantBlocks()

    def rank(tenant: str) -> tuple[int, int, str]:
        queue = queues.get(tenant, no_queue)
        return queue.num_running + queue.num_waiting, blocks.get(tenant, no_blocks).num_blocks, tenant

    first = heapq.nlargest(MAX_REPORTED_TENANTS, queues.keys() | blocks.keys(), key=rank)
    return tuple(_tenant(one, queues.get(one, no_queue), blocks.get(one, no_blocks)) for one in first)


def _tenant(tenant: str, queue: TenantQueue, blocks: TenantBlocks) -> TenantReport:
    return TenantReport(
        tenant,
        queue.weight,
        queue.num_running,
        queue.num_waiting,
        round(queue.oldest_wait_s * 1000),
        blocks.num_held,
        blocks.num_retained,
        blocks.num_pinned,
        blocks.num_evicted,
    )
