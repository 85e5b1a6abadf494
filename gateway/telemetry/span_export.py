"""Planned spans get the ids that were sent before, and wait for the thread that sends them by OTLP. What has no room, and
what the collector does not take, is dropped and counted.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import SpanContext, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gateway.telemetry.made_span import Exporter, MadeSpan
from gateway.telemetry.record import RequestRecord
from gateway.telemetry.spans import Kind, PlannedSpan

MAX_QUEUED_SPANS = 2048
SCOPE = "headgate"
_W3C = TraceContextTextMapPropagator()
_ids = RandomIdGenerator()


class OtlpExporter:
    """Sends spans by OTLP/HTTP."""

    def __init__(self, environ: Mapping[str, str], slot: int) -> None:
        from gateway.telemetry import otlp  # it loads a client of HTTP, which few gateways need

        resource = Resource.create(
            {
                "service.name": environ.get("OTEL_SERVICE_NAME") or "headgate-gateway",
                "service.instance.id": f"gateway-{slot}",
            }
        )
        self._attributes = dict(resource.attributes)
        self._encoded = otlp.encoded
        self._collector = otlp.Collector(environ)

    def export(self, spans: Sequence[MadeSpan]) -> bool:
        return self._collector.send(self._encoded(spans, self._attributes, SCOPE))

    def close(self) -> None:
        self._collector.close()


def exporter(environ: Mapping[str, str] = os.environ, *, slot: int = 0) -> Exporter | None:
    """Returns the exporter that the standard OTEL_* variables describe, or None if no exporter is configured."""
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if environ.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return None
    if not any(environ.get(name) for name in endpoints):
        return None
    return OtlpExporter(environ, slot)


def parse(traceparent: str) -> SpanContext | None:
    """Parses a W3C trace context; None if it is missing or malformed."""
    if not traceparent:
        return None
    found = _W3C.extract({"traceparent": traceparent}, Context())
    context = get_current_span(found).get_span_context()
    return context if context.is_valid else None


class TraceIds(NamedTuple):
    """The trace of a request, and its two spans whose ids were sent before the spans were made."""

    trace_id: int
    server: int
    client: int

    @classmethod
    def of(cls, record: RequestRecord) -> TraceIds:
        """Reads what `Tracing.start` has written."""
        own = record.outgoing_traceparent
        return cls(int(own[3:35], 16), int(own[36:52], 16), int(record.worker_traceparent[36:52], 16))

    def preset(self, kind: Kind) -> int:
        """Returns the id that a span of this kind has; 0 means any."""
        return self.server if kind == "server" else self.client if kind == "client" else 0


class _Counted(SpanExporter):
    """Counts the spans that left the queue, so that the queue's length is known without looking inside it, and those
    that the collector did not take.
    """

    def __init__(self, inner: Exporter) -> None:
        self._inner = inner
        self.num_taken = 0
        self.num_lost = 0

    def export(self, spans: Sequence[Any]) -> SpanExportResult:
        self.num_taken += len(spans)
        is_taken = False
        try:
            is_taken = self._inner.export(spans)
        finally:
            if not is_taken:
                self.num_lost += len(spans)
        return SpanExportResult.SUCCESS if is_taken else SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self._inner.close()


class SpanExport:
    """The SDK's queue, whose own thread hands ended spans to the exporter. A full queue drops whole requests and counts
    them.

    The queue holds spans as they were planned, with their ids. The SDK's spans are for work that is still open: their
    ids are drawn, and each step is locked, checked and copied.
    """

    def __init__(self, export_to: Exporter) -> None:
        self._counted = _Counted(export_to)
        self._queue = BatchSpanProcessor(self._counted, max_queue_size=MAX_QUEUED_SPANS)
        self._num_sent = 0
        self.num_refused = 0
        """Spans for which there was no room."""

    @property
    def num_dropped(self) -> int:
        return self.num_refused + self._counted.num_lost

    def send(
        self, top: PlannedSpan, ids: TraceIds, parent: SpanContext | None, links: Sequence[SpanContext] = ()
    ) -> bool:
        """Takes a span with those below it. Returns False if there is no room, and counts them as dropped."""
        num_spans = _size(top)
        if self._num_sent - self._counted.num_taken + num_spans > MAX_QUEUED_SPANS:
            self.num_refused += num_spans
            return False
        self._num_sent += num_spans
        self._make(top, ids, parent.span_id if parent else 0, parent is not None and parent.is_remote, links)
        return True

    def _make(
        self, planned: PlannedSpan, ids: TraceIds, parent_id: int, is_remote: bool, links: Sequence[SpanContext]
    ) -> None:
        span_id = ids.preset(planned.kind) or _ids.generate_span_id()
        for child in planned.children:
            self._make(child, ids, span_id, False, ())
        made = MadeSpan(planned, ids.trace_id, span_id, parent_id, is_remote, links)
        self._queue.on_end(made)  # type: ignore[arg-type]  # it reads `context`

    def shutdown(self) -> None:
        self._queue.shutdown()  # type: ignore[no-untyped-call]


def _size(span: PlannedSpan) -> int:
    return 1 + sum(_size(child) for child in span.children)
