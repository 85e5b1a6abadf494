"""Metric families of attempts, updated when one ends. The module knows no socket.

The histograms of times have exemplars: of attempts whose gateway said at the start that their spans are exported.
"""

from __future__ import annotations

from prometheus_client import Counter

from workers.engine.reports.families import Families
from workers.engine.sequences.sequence import Attempt
from workers.protocol.trace_context import exemplar


class AttemptMetrics:
    def __init__(self, families: Families) -> None:
        self._labels = families.labels
        self._success = Counter(
            "vllm:request_success",
            "Attempts that have ended, by the reason of the end.",
            [*families.labels, "finished_reason"],
            registry=families.registry,
        )
        self._of_tokens(families)
        self._of_times(families)

    def _of_tokens(self, families: Families) -> None:
        counter, tokens = families.counter, families.tokens
        self._prompt = counter(
            "vllm:prompt_tokens", "Prompt tokens of attempts that have ended, cached tokens included."
        )
        self._queries = counter("vllm:prefix_cache_queries", "Prompt tokens that were looked up in the prefix cache.")
        self._hits = counter("vllm:prefix_cache_hits", "Prompt tokens that were found in the prefix cache.")
        self._prompt_size = tokens("vllm:request_prompt_tokens", "Number of prompt tokens of an attempt.")
        self._output_size = tokens("vllm:request_generation_tokens", "Number of output tokens of an attempt.")
        self._max_tokens = tokens("vllm:request_params_max_tokens", "The max_tokens that an attempt asked for.")

    def _of_times(self, families: Families) -> None:
        seconds = families.seconds
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

    def ended(self, attempt: Attempt) -> None:
        usage = attempt.usage
        self._success.labels(**self._labels, finished_reason=attempt.end_reason).inc()
        self._prompt.inc(usage.prompt)
        self._queries.inc(usage.prompt)
        self._hits.inc(usage.cache_read)
        self._prompt_size.observe(usage.prompt)
        self._output_size.observe(usage.output)
        self._max_tokens.observe(attempt.message.max_tokens)
        self._took(attempt)

    def _took(self, attempt: Attempt) -> None:
        at: dict[str, float] = {}
        for event in attempt.report.timeline:
            at.setdefault(event.name, event.offset_us / 1e6)
        traced = exemplar(attempt.message.traceparent)
        end = at["finished"]
        self._e2e.observe(end, traced)
        if (matched := at.get("matched")) is None:
            return
        self._queue.observe(matched, traced)
        self._inference.observe(end - matched, traced)
        if (first := at.get("first_token")) is not None:
            self._ttft.observe(first, traced)
            self._prefill.observe(first - matched, traced)
            self._decode.observe(end - first, traced)
