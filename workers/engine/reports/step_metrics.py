"""Metric families of steps, updated with each step. The module knows no socket."""

from __future__ import annotations

from prometheus_client import Counter, Histogram

from workers.engine.reports.families import SECONDS, Families
from workers.engine.values.record import StepRecord


class StepMetrics:
    def __init__(self, families: Families) -> None:
        self._size = families.tokens("vllm:iteration_tokens_total", "Number of tokens that a step computes.")
        self._tokens = Counter(
            "headgate_step_tokens",
            "Tokens that were computed, by the phase of the step and by tier.",
            ["phase", "tier"],
            registry=families.registry,
        )
        self._seconds = Histogram(
            "headgate_step_seconds",
            "Seconds that a step takes, by its phase.",
            ["phase"],
            buckets=SECONDS,
            registry=families.registry,
        )
        self.gaps = families.weighted("vllm:inter_token_latency_seconds", "Seconds between two tokens of a sequence.")
        self._of_counts(families)

    def _of_counts(self, families: Families) -> None:
        counter = families.counter
        self._generation = counter("vllm:generation_tokens", "Output tokens that were generated.")
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
        self._poisoned = counter(
            "headgate_poisoned_attempts", "Attempts that were ended because their own row made a step fail."
        )

    def ran(self, step: StepRecord) -> None:
        num_decode = step.num_decode_seqs + step.num_proposed
        self._size.observe(step.num_prefill_tokens + num_decode)
        for phase, num_tokens, num_batch in (
            ("prefill", step.num_prefill_tokens, step.num_batch_prefill_tokens),
            ("decode", num_decode, step.num_batch_decode_tokens),
        ):
            self._tokens.labels(phase, "interactive").inc(num_tokens - num_batch)
            self._tokens.labels(phase, "batch").inc(num_batch)
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
            self._seconds.labels(phase).observe(seconds)

    def failed(self, num_out_of_memory: int, num_poisoned: int) -> None:
        self._out_of_memory.inc(num_out_of_memory)
        self._poisoned.inc(num_poisoned)
