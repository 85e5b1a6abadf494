"""The OpenTelemetry SDK's side of tracing: planned spans become spans with the ids that were sent before, and a thread of
the SDK sends them by OTLP. What has no room, and what the collector does not take, is dropped and counted.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gateway.telemetry import names
from gateway.telemetry.record import RequestRecord
from gateway.telemetry.spans import Kind, PlannedSpan

MAX_QUEUED_SPANS = 2048
_KINDS = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_SCOPE = InstrumentationScope("headgate")
_UNSET, _FAILED = Status(StatusCode.UNSET), Status(StatusCode.ERROR)
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
    # It loads protobuf, about 10 MB, which few gateways need.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


def parse(traceparent: str) -> SpanContext | None:
    """Parses a W3C trace context; None if it is missing or malformed."""
    if not traceparent:
        return None
    found = _W3C.extract({"traceparent": traceparent}, Context())
    context = get_current_span(found).get_span_context()
    return context if context.is_valid else None


@dataclass(frozen=True)
class TraceIds:
    """The two spans of a request whose ids were sent before the spans were made."""

    server: SpanContext
    client: SpanContext

    @classmethod
    def of(cls, record: RequestRecord) -> TraceIds:
        return cls(_told(record.outgoing_traceparent), _told(record.worker_traceparent))

    def preset(self, kind: Kind) -> int:
        """Returns the id that a span of this kind has; 0 means any."""
        return {"server": self.server.span_id, "client": self.client.span_id}.get(kind, 0)


def _told(traceparent: str) -> SpanContext:
    """Returns the context of a `traceparent` that this process wrote itself."""
    _, trace_id, span_id, flags = traceparent.split("-")
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16)))


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
    """The SDK's side: it takes ended spans, and its own thread sends them by OTLP. A full queue drops whole requests and
    counts them.

    Spans are made as the SDK's exporters read them. The SDK's tracer is for spans that are still open: it draws ids, and
    it locks, checks and copies at each step. It takes five times as long.
    """

    def __init__(self, export_to: SpanExporter, slot: int) -> None:
        self._counted = _Counted(export_to)
        self._queue = BatchSpanProcessor(self._counted, max_queue_size=MAX_QUEUED_SPANS)
        self._resource = Resource.create(
            {
                "service.name": os.environ.get("OTEL_SERVICE_NAME") or "headgate-gateway",
                "service.instance.id": f"gateway-{slot}",
            }
        )
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
        self._make(top, ids, parent, links)
        return True

    def _make(self, planned: PlannedSpan, ids: TraceIds, parent: SpanContext | None, links: Sequence[Link]) -> None:
        span_id = ids.preset(planned.kind) or _ids.generate_span_id()
        context = SpanContext(ids.server.trace_id, span_id, is_remote=False, trace_flags=_SAMPLED)
        attributes, status = planned.attributes, _UNSET
        if planned.error:
            attributes, status = {**attributes, names.ERROR_TYPE: planned.error}, _FAILED
        for child in planned.children:
            self._make(child, ids, context, ())
        self._queue.on_end(
            ReadableSpan(
                planned.name,
                context,
                parent,
                self._resource,
                attributes,
                [Event(name, given, at) for name, at, given in planned.events],
                links,
                _KINDS[planned.kind],
                status=status,
                start_time=planned.start_ns,
                end_time=planned.end_ns,
                instrumentation_scope=_SCOPE,
            )
        )

    def shutdown(self) -> None:
        self._queue.shutdown()  # type: ignore[no-untyped-call]


def _size(span: PlannedSpan) -> int:
    return 1 + sum(_size(child) for child in span.children)
