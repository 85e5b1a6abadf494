"""The gateway's metric families, and the counting of finished requests. Labels are bounded: a client cannot create a
series (operations.md 3.3).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import prometheus_client
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Histogram, Metric
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.registry import Collector

from gateway.telemetry import names
from gateway.telemetry.exposition import Labelled
from gateway.telemetry.labels import OTHER, FirstSeen, Series
from gateway.telemetry.record import RequestRecord
from gateway.telemetry.tracing import Tracing
from workers.process import rounds
from workers.process.metrics_text import Page, expose
from workers.protocol.trace_context import exemplar

DURATION_BUCKETS = tuple(0.01 * 2**i for i in range(14))
PER_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
GENAI_LABELS = ("gen_ai_operation_name", "gen_ai_request_model")
WAIT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
MAX_REASONS = 64
"""More than there are error codes: a code that carried a client's text could not multiply the series."""

RUN = "/v1/responses/{response_id}/run"
"""The route as which a run in the background is counted: by the request's own route its tries would be client's errors."""


class Metrics:
    """The owner of the registry. Other modules register their own families in `registry`."""

    def __init__(self, slot: int) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # the library has no types here
        self.registry = CollectorRegistry()
        self._labelled = CollectorRegistry()
        self._labelled.register(Labelled(self.registry, slot))
        self._models: frozenset[str] = frozenset()
        counter, histogram = partial(Counter, registry=self.registry), partial(Histogram, registry=self.registry)
        self.duration = histogram(
            "gen_ai_server_request_duration_seconds",
            "Seconds from the acceptance of a request to the last byte of its answer.",
            GENAI_LABELS,
            buckets=DURATION_BUCKETS,
        )
        self.first_token = histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "Seconds from the acceptance of a request to the first byte of its stream.",
            GENAI_LABELS,
            buckets=DURATION_BUCKETS,
        )
        self.per_token = histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Seconds per output token after the first: (duration - time to first token) / (output tokens - 1).",
            GENAI_LABELS,
            buckets=PER_TOKEN_BUCKETS,
        )
        self.requests = counter(
            "headgate_requests", "Requests that have finished.", ("route", "model", "tier", "outcome")
        )
        self.disconnects = counter(
            "headgate_client_disconnects", "Clients that disconnected before their answer was complete.", ("phase",)
        )
        for phase in ("queue_or_prefill", "decode"):
            self.disconnects.labels(phase)
        self.loop_lag = histogram(
            "headgate_event_loop_lag_seconds",
            "Seconds by which a timer of 100 ms fires too late, or one of 1 s while no request runs.",
            buckets=(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
        )
        self.admissions = counter(
            "headgate_admission",
            "Requests for an answer: admitted, or refused and with which error code.",
            ("decision", "reason"),
        )
        self.admission_wait = histogram(
            "headgate_admission_wait_seconds",
            "From the tokenized prompt to the admission.",
            ("tier",),
            buckets=WAIT_BUCKETS,
        )
        self.registry.register(BackgroundMetrics())
        self._reasons = FirstSeen(MAX_REASONS)
        self._series = Series()

    def serve_models(self, models: Iterable[str]) -> None:
        """Sets the only values of the label `model`; all other names become `_other`."""
        self._models = frozenset(models)

    def page(self, accept: str) -> Page:
        return expose(self._labelled, accept)

    def observe(self, record: RequestRecord) -> None:
        model = self.model_label(record.model)
        self._series.of(self.requests, _route(record), model, record.tier or "none", record.outcome).inc()
        if record.disconnect_phase:
            self._series.of(self.disconnects, record.disconnect_phase).inc()
        operation = names.OPERATIONS.get(record.route)
        if operation is None or not record.is_answer:
            return
        traced = exemplar(record.outgoing_traceparent)
        self._admitted_or_not(record, traced)
        if record.status != 200 or record.background:
            return
        end_ms, first_ms = record.offset_ms("last_byte"), record.offset_ms("first_byte")
        if end_ms is not None:
            self._series.of(self.duration, operation, model).observe(end_ms / 1e3, traced)
        if record.stream and end_ms is not None and first_ms is not None:
            self._series.of(self.first_token, operation, model).observe(first_ms / 1e3, traced)
            if record.usage.output > 1:
                per_token = (end_ms - first_ms) / 1e3 / (record.usage.output - 1)
                self._series.of(self.per_token, operation, model).observe(per_token, traced)

    def _admitted_or_not(self, record: RequestRecord, traced: dict[str, str] | None) -> None:
        admitted_ms, tokenized_ms = record.offset_ms("admitted"), record.offset_ms("tokenized")
        if admitted_ms is not None:
            self._series.of(self.admissions, "admitted", "").inc()
            if tokenized_ms is not None:
                self._series.of(self.admission_wait, record.tier or "none").observe(
                    (admitted_ms - tokenized_ms) / 1e3, traced
                )
        elif record.error_code:
            self._series.of(self.admissions, "refused", self._reasons.label(record.error_code)).inc()

    def model_label(self, name: str) -> str:
        """Returns the label of a model. A model with an adapter counts as its base model."""
        base = name.rpartition(":")[0]
        return next((known for known in (name, base) if known in self._models), OTHER)


def _route(record: RequestRecord) -> str:
    """Returns the label `route`: the template. Service levels count the routes of `names.OPERATIONS`, so what is no
    request for an answer there has another label.
    """
    if record.background == "run":
        return RUN
    return (
        record.route if record.is_answer or record.route not in names.OPERATIONS else f"{record.method} {record.route}"
    )


class BackgroundMetrics(Collector):
    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "headgate_background_failures",
            "Failures of background work that nobody foresaw. Work that is done in rounds goes on with the next one, other work begins again.",
            labels=["work"],
        )
        for work, count in rounds.num_failed.items():
            family.add_metric([work], count)
        yield family


class TracingMetrics(Collector):
    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "headgate_trace_spans_dropped",
            "Spans that the collector did not take, or for which no room was left because it is slow.",
            value=self._tracing.num_dropped,
        )


METRICS = web.AppKey("metrics", Metrics)
