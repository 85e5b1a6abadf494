"""The OpenTelemetry SDK's side of tracing: planned spans become spans with the ids that were told before, and a thread of
the SDK sends them by OTLP. What has no room, and what the collector does not take, is dropped and counted.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gateway.telemetry import names
from gateway.telemetry.record import RequestRecord
from gateway.telemetry.spans import Kind, PlannedSpan

MAX_QUEUED_SPANS = 2048
MAX_EVENTS = 1024
"""More events than any span has: the worker's and the lease's are bounded."""
_KINDS = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}
_W3C = TraceContextTextMapPropagator()
_ids = RandomIdGenerator()


def exporter(environ: Mapping[str, str] = os.environ) -> SpanExporter | None:
    """Returns the exporter that the standard OTEL_* variables describe, or None if no exporter is configured."""
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if environ.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return None
    if not any(environ.get(name) for name in endpoints):
        return None
    return OTLPSpanExporter()


def parse(traceparent: str) -> SpanContext | None:
    """Parses a W3C trace context; None if it is missing or malformed."""
    if not traceparent:
        return None
    found = _W3C.extract({"traceparent": traceparent}, Context())
    context = get_current_span(found).get_span_context()
    return context if context.is_valid else None


class _PresetIds(IdGenerator):
    """An id generator with preset ids. The SDK draws ids when a span starts; ours were sent to the
    worker long before.
    """

    def __init__(self) -> None:
        self.trace_id = 0
        self.span_id = 0
        """The id of the next span; 0 means a random one."""

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        preset, self.span_id = self.span_id, 0
        return preset or _ids.generate_span_id()


@dataclass(frozen=True)
class TraceIds:
    """The two spans of a request whose ids were told before the spans were made."""

    server: SpanContext
    client: SpanContext

    @classmethod
    def of(cls, record: RequestRecord) -> TraceIds:
        server, client = parse(record.outgoing_traceparent), parse(record.worker_traceparent)
        assert server is not None and client is not None
        return cls(server, client)

    def preset(self, kind: Kind) -> int:
        """Returns the id that a span of this kind has; 0 means any."""
        return {"server": self.server.span_id, "client": self.client.span_id}.get(kind, 0)


class _Counted(SpanExporter):
    """Counts the spans that left the queue, so that the queue's length is known without looking inside it, and those
    that the collector did not take.
    """

    def __init__(self, inner: SpanExporter) -> None:
        self._inner = inner
        self.num_taken = 0
        self.num_lost = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.num_taken += len(spans)
        result = SpanExportResult.FAILURE
        try:
            result = self._inner.export(spans)
        finally:
            if result is not SpanExportResult.SUCCESS:
                self.num_lost += len(spans)
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()


class SpanExport:
    """The SDK's side: it takes spans, and its own thread sends them by OTLP. A full queue drops whole requests and
    counts them.
    """

    def __init__(self, export_to: SpanExporter, slot: int) -> None:
        self._counted = _Counted(export_to)
        self._new_ids = _PresetIds()
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,
            id_generator=self._new_ids,
            span_limits=SpanLimits(max_events=MAX_EVENTS),
            shutdown_on_exit=False,
            resource=Resource.create(
                {
                    "service.name": os.environ.get("OTEL_SERVICE_NAME") or "headgate-gateway",
                    "service.instance.id": f"gateway-{slot}",
                }
            ),
        )
        self._provider.add_span_processor(BatchSpanProcessor(self._counted, max_queue_size=MAX_QUEUED_SPANS))
        self._tracer = self._provider.get_tracer("headgate")
        self._num_sent = 0
        self.num_refused = 0
        """Spans for which there was no room."""

    @property
    def num_dropped(self) -> int:
        return self.num_refused + self._counted.num_lost

    def send(self, top: PlannedSpan, ids: TraceIds, parent: SpanContext | None, links: Sequence[Link] = ()) -> bool:
        """Takes a span with those below it. Returns False if there is no room, and counts them as dropped."""
        num_spans = _size(top)
        if self._num_sent - self._counted.num_taken + num_spans > MAX_QUEUED_SPANS:
            self.num_refused += num_spans
            return False
        self._num_sent += num_spans
        self._new_ids.trace_id = ids.server.trace_id
        self._make(top, ids, parent, links)
        return True

    def _make(self, planned: PlannedSpan, ids: TraceIds, parent: SpanContext | None, links: Sequence[Link]) -> None:
        self._new_ids.span_id = ids.preset(planned.kind)
        # An empty context is below it: the context of the calling task must not affect these spans.
        above = set_span_in_context(NonRecordingSpan(parent), Context()) if parent else Context()
        span = self._tracer.start_span(
            planned.name, above, _KINDS[planned.kind], planned.attributes, links, planned.start_ns
        )
        for name, at, attributes in planned.events:
            span.add_event(name, attributes, at)
        if planned.error:
            span.set_attribute(names.ERROR_TYPE, planned.error)
            span.set_status(Status(StatusCode.ERROR))
        for child in planned.children:
            self._make(child, ids, span.get_span_context(), ())
        span.end(planned.end_ns)

    def shutdown(self) -> None:
        self._provider.shutdown()


def _size(span: PlannedSpan) -> int:
    return 1 + sum(_size(child) for child in span.children)
