"""The worker's metric families (operations.md section 3.2), by what they tell of: attempts, steps, cache, queues, use of
blocks. They are updated once per step and read by a scrape. The module knows no socket."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Gauge, Info, disable_created_metrics

from workers.engine.engine import StepOutput
from workers.engine.reports.attempt_metrics import AttemptMetrics
from workers.engine.reports.cache_metrics import CacheMetrics
from workers.engine.reports.families import Families
from workers.engine.reports.occupancy_metrics import OccupancyMetrics
from workers.engine.reports.queue_metrics import QueueMetrics
from workers.engine.reports.step_metrics import StepMetrics
from workers.engine.values.plan import KernelState
from workers.protocol.reports import WorkerStatus


class Metrics:
    def __init__(self, model: str, slot: int, block_size: int, num_blocks: int, *, by_tenant: bool = False) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        families = Families(self.registry, {"model_name": model, "engine": str(slot)})
        self._state = _State(families, block_size, num_blocks)
        self._steps = StepMetrics(families)
        self._attempts = AttemptMetrics(families)
        self._cache = CacheMetrics(families, by_tenant=by_tenant)
        self._queues = QueueMetrics(families)
        self._occupancy = OccupancyMetrics(self.registry)

    def tell_kernels(self, kernels: Iterable[KernelState]) -> None:
        """Records the implementation that the worker runs for each op. It is known once, at start."""
        info = Gauge(
            "headgate_kernel_info",
            "The implementation that runs for an op, and how its check at start ended.",
            ["op", "implementation", "state"],
            registry=self.registry,
        )
        for kernel in kernels:
            info.labels(kernel.op, kernel.implementation, kernel.state).set(1)

    def observe(self, out: StepOutput) -> None:
        self._state.observe(out.status)
        for step in out.steps:
            self._steps.ran(step)
        self._steps.failed(out.num_out_of_memory, out.num_poisoned)
        for gap, count in out.token_gaps.items():
            self._steps.gaps.observe(gap, count)
        for attempt in out.ended:
            self._attempts.ended(attempt)
            self._cache.ended(attempt)
        if out.cache is not None:
            self._cache.observe(out.cache)
        if out.occupancy is not None:
            self._occupancy.observe(out.occupancy)
        if out.queues is not None:
            self._queues.observe(out.queues)


class _State:
    """The worker's present load, as its status tells gateways."""

    def __init__(self, families: Families, block_size: int, num_blocks: int) -> None:
        self._num_blocks = num_blocks - 1  # without the null block
        gauge, labels = families.gauge, families.labels
        self._running = gauge("vllm:num_requests_running", "Sequences that hold blocks now.")
        self._waiting = gauge(
            "vllm:num_requests_waiting", "Sequences that wait now for blocks or for a place in the batch."
        )
        self._usage = gauge(
            "vllm:kv_cache_usage_perc", "Share of all blocks that running sequences hold now, from 0 to 1."
        )
        info = Info(
            "vllm:cache_config",
            "Size of the block pool: slots per block and number of blocks.",
            list(labels),
            registry=families.registry,
        )
        info.labels(**labels).info({"block_size": str(block_size), "num_gpu_blocks": str(num_blocks)})

    def observe(self, status: WorkerStatus) -> None:
        self._running.set(status.running)
        self._waiting.set(status.waiting)
        self._usage.set(1 - (status.free_blocks + status.evictable_blocks) / self._num_blocks)
