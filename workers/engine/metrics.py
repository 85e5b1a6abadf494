"""The worker's metric families (operations.md section 3.2). They are updated once per step and read by a scrape. The
module knows no socket."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, disable_created_metrics

from workers.engine.engine import StepOutput
from workers.engine.reports.cache_metrics import CacheMetrics
from workers.engine.reports.histograms import WeightedHistogram
from workers.engine.reports.occupancy import Occupancy
from workers.engine.reports.queue_metrics import QueueMetrics
from workers.engine.sequences.sequence import Attempt
from workers.engine.values.plan import KernelState

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000)


class Metrics:
    def __init__(self, model: str, slot: int, block_size: int, num_blocks: int, *, by_tenant: bool = False) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model, "engine": str(slot)}
        self._num_blocks = num_blocks - 1
        self._cache = CacheMetrics(self.registry, self._labels, by_tenant=by_tenant)
        self._queues = QueueMetrics(self.registry)
        gauge, counter, seconds, tokens = self._gauge, self._counter, self._seconds, self._tokens
        self._running = gauge("vllm:num_requests_running", "Sequences that hold blocks now.")
        self._waiting = gauge(
            "vllm:num_requests_waiting", "Sequences that wait now for blocks or for a place in the batch."
        )
        self._usage = gauge(
            "vllm:kv_cache_usage_perc", "Share of all blocks that running sequences hold now, from 0 to 1."
        )
        self._prompt = counter(
            "vllm:prompt_tokens", "Prompt tokens of attempts that have ended, cached tokens included."
        )
        self._generation = counter("vllm:generation_tokens", "Output tokens that were generated.")
        self._queries = counter("vllm:prefix_cache_queries", "Prompt tokens that were looked up in the prefix cache.")
        self._hits = counter("vllm:prefix_cache_hits", "Prompt tokens that were found in the prefix cache.")
        self._preemptions = counter("vllm:num_preemptions", "Preemptions: sequences that lost their blocks to others.")
        self._recomputed = counter(
            "headgate_recomputed_tokens", "Tokens that were computed again, because their sequence had lost its blocks."
        )
        self._discarded = counter(
            "headgate_lag_discarded_tokens", "Tokens that were computed for sequences that had already ended."
        )
        self._proposed = counter("vllm:spec_decode_num_draft_tokens", "Tokens that speculative decoding proposed.")
        self._accepted = counter(
            "vllm:spec_decode_num_accepted_tokens", "Tokens that speculative decoding proposed and the model accepted."
        )
        self._out_of_memory = counter(
            "headgate_out_of_memory_steps", "Steps that failed because the memory of the device was full."
        )
        self._success = Counter(
            "vllm:request_success",
            "Attempts that have ended, by the reason of the end.",
            [*self._labels, "finished_reason"],
            registry=self.registry,
        )
        self._ttft = seconds(
            "vllm:time_to_first_token_seconds", "Seconds from the arrival of an attempt to its first token."
        )
        self._e2e = seconds("vllm:e2e_request_latency_seconds", "Seconds from the arrival of an attempt to its end.")
        self._queue = seconds(
            "vllm:request_queue_time_seconds", "Seconds from the arrival of an attempt to its first admission."
        )
        self._prefill = seconds(
            "vllm:request_prefill_time_seconds", "Seconds from the first admission of an attempt to its first token."
        )
        self._decode = seconds(
            "vllm:request_decode_time_seconds", "Seconds from the first token of an attempt to its end."
        )
        self._inference = seconds(
            "vllm:request_inference_time_seconds", "Seconds from the first admission of an attempt to its end."
        )
        self._prompt_size = tokens("vllm:request_prompt_tokens", "Number of prompt tokens of an attempt.")
        self._output_size = tokens("vllm:request_generation_tokens", "Number of output tokens of an attempt.")
        self._max_tokens = tokens("vllm:request_params_max_tokens", "The max_tokens that an attempt asked for.")
        self._step_size = tokens("vllm:iteration_tokens_total", "Number of tokens that a step computes.")
        self._gaps = WeightedHistogram(
            "vllm:inter_token_latency_seconds", "Seconds between two tokens of a sequence.", self._labels, SECONDS
        )
        self.registry.register(self._gaps)
        self._blocks = Gauge("headgate_cache_blocks", "Blocks by their state now.", ["state"], registry=self.registry)
        self._sharing = Gauge(
            "headgate_sharing_blocks",
            "Blocks of requests with several choices: held now, and what they would hold without sharing.",
            ["mode", "kind"],
            registry=self.registry,
        )
        self._slots = Gauge(
            "headgate_kv_slots",
            "Token slots in the blocks of running sequences: allocated, and in use.",
            ["kind"],
            registry=self.registry,
        )
        self._step_tokens = Counter(
            "headgate_step_tokens",
            "Tokens that were computed, by the phase of the step.",
            ["phase"],
            registry=self.registry,
        )
        self._tier_tokens = Counter(
            "headgate_tier_tokens", "Tokens that were computed, by tier.", ["tier"], registry=self.registry
        )
        self._steps = Histogram(
            "headgate_step_seconds",
            "Seconds that a step takes, by its phase.",
            ["phase"],
            buckets=SECONDS,
            registry=self.registry,
        )
        info = Info(
            "vllm:cache_config",
            "Size of the block pool: slots per block and number of blocks.",
            list(self._labels),
            registry=self.registry,
        )
        info.labels(**self._labels).info({"block_size": str(block_size), "num_gpu_blocks": str(num_blocks)})

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
        status = out.status
        self._running.set(status.running)
        self._waiting.set(status.waiting)
        held = self._num_blocks - status.free_blocks - status.evictable_blocks
        self._usage.set(held / self._num_blocks)
        for state, count in (("free", status.free_blocks), ("evictable", status.evictable_blocks), ("held", held)):
            self._blocks.labels(state).set(count)
        self._out_of_memory.inc(out.num_out_of_memory)
        for step in out.steps:
            num_decode = step.num_decode_seqs + step.num_proposed
            self._step_size.observe(step.num_prefill_tokens + num_decode)
            self._step_tokens.labels("prefill").inc(step.num_prefill_tokens)
            self._step_tokens.labels("decode").inc(num_decode)
            self._tier_tokens.labels("interactive").inc(step.num_tokens - step.num_batch_tokens)
            self._tier_tokens.labels("batch").inc(step.num_batch_tokens)
            self._proposed.inc(step.num_proposed)
            self._accepted.inc(step.num_accepted)
            self._generation.inc(step.num_output_tokens)
            self._preemptions.inc(step.num_preempted)
            self._recomputed.inc(step.num_recomputed)
            self._discarded.inc(step.num_lag_discarded)
            for phase, seconds in (
                ("plan", step.plan_s),
                ("execute", step.execute_s),
                ("commit", step.commit_s),
                ("idle", step.idle_s),
            ):
                self._steps.labels(phase).observe(seconds)
        for gap, count in out.token_gaps.items():
            self._gaps.observe(gap, count)
        for attempt in out.ended:
            self._ended(attempt)
            self._cache.ended(attempt)
        if out.cache is not None:
            self._cache.observe(out.cache)
        if out.occupancy is not None:
            self._occupied(out.occupancy)
        if out.queues is not None:
            self._queues.observe(out.queues)

    def _occupied(self, found: Occupancy) -> None:
        for mode, shared in found.shared.items():
            self._sharing.labels(mode, "held").set(shared.num_held)
            self._sharing.labels(mode, "unshared").set(shared.num_unshared)
        self._slots.labels("allocated").set(found.num_slots)
        self._slots.labels("used").set(found.num_used)

    def _ended(self, attempt: Attempt) -> None:
        usage = attempt.usage
        self._success.labels(**self._labels, finished_reason=attempt.end_reason).inc()
        self._prompt.inc(usage.prompt)
        self._queries.inc(usage.prompt)
        self._hits.inc(usage.cache_read)
        self._prompt_size.observe(usage.prompt)
        self._output_size.observe(usage.output)
        self._max_tokens.observe(attempt.message.max_tokens)
        at: dict[str, float] = {}
        for event in attempt.timeline:
            at.setdefault(event.name, event.offset_us / 1e6)
        end = at["finished"]
        self._e2e.observe(end)
        if (matched := at.get("matched")) is None:
            return
        self._queue.observe(matched)
        self._inference.observe(end - matched)
        if (first := at.get("first_token")) is not None:
            self._ttft.observe(first)
            self._prefill.observe(first - matched)
            self._decode.observe(end - first)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, list(self._labels), registry=self.registry).labels(**self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, list(self._labels), registry=self.registry).labels(**self._labels)

    def _seconds(self, name: str, text: str) -> Histogram:
        return self._histogram(name, text, SECONDS)

    def _tokens(self, name: str, text: str) -> Histogram:
        return self._histogram(name, text, TOKENS)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(name, text, list(self._labels), buckets=buckets, registry=self.registry)
        return histogram.labels(**self._labels)
