"""Trees of spans wait for the thread that sends them by OTLP. It plans them there, many one after the other, which takes a
third of the time that one behind each request takes, and gives them the ids that were sent before. What has no room, and what
the collector does not take, is dropped and counted.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import SpanContext, TraceFlags, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gateway.telemetry.made_span import Exporter, MadeSpan
from gateway.telemetry.record import RequestRecord
from gateway.telemetry.spans import Kind, PlannedSpan

logger = logging.getLogger(__name__)

MAX_QUEUED = 512
"""Trees that wait: one of each request, of some eight spans, and one of its shipping."""
SENT_TOGETHER = 128
"""Trees of one body."""
SCOPE = "headgate"
_W3C = TraceContextTextMapPropagator()
_ids = RandomIdGenerator()
_SAMPLED = SpanContext(1, 1, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


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


class SpanTree(NamedTuple):
    """A span with those below it, before it is planned."""

    plan: Callable[[], PlannedSpan]
    ids: TraceIds
    parent: SpanContext | None = None
    links: Sequence[SpanContext] = ()

    @property
    def context(self) -> SpanContext:
        """The SDK's queue reads this, because it takes nothing that is not sampled. All trees show it the same one."""
        return _SAMPLED

    def made(self) -> Iterator[MadeSpan]:
        """Yields the spans, each behind those below it."""
        parent = self.parent
        return self._below(
            self.plan(), parent.span_id if parent else 0, parent is not None and parent.is_remote, self.links
        )

    def _below(
        self, planned: PlannedSpan, parent_id: int, is_remote: bool, links: Sequence[SpanContext]
    ) -> Iterator[MadeSpan]:
        span_id = self.ids.preset(planned.kind) or _ids.generate_span_id()
        for child in planned.children:
            yield from self._below(child, span_id, False, ())
        yield MadeSpan(planned, self.ids.trace_id, span_id, parent_id, is_remote, links)


class _Counted(SpanExporter):
    """Counts the trees that left the queue, so that the queue's length is known without looking inside it, and the spans
    that the collector did not take.
    """

    def __init__(self, inner: Exporter) -> None:
        self._inner = inner
        self.num_taken = 0
        self.num_lost = 0

    def export(self, trees: Sequence[Any]) -> SpanExportResult:
        self.num_taken += len(trees)
        spans = [span for tree in trees for span in self._made(tree)]
        is_taken = False
        try:
            is_taken = self._inner.export(spans)
        finally:
            if not is_taken:
                self.num_lost += len(spans)
        return SpanExportResult.SUCCESS if is_taken else SpanExportResult.FAILURE

    def _made(self, tree: Any) -> list[Any]:
        """Returns a tree's spans. One that cannot be planned is lost alone."""
        try:
            return list(tree.made())
        except Exception:  # a fault of ours in one plan: the other trees are still sent
            logger.exception("spans_not_planned")
            self.num_lost += 1
            return []

    def shutdown(self) -> None:
        self._inner.close()


class SpanExport:
    """The SDK's queue, whose own thread hands trees to the exporter. A full queue drops whole requests and counts their
    spans. The SDK's own spans are for work that is still open: their ids are drawn, and each step is locked, checked and
    copied.
    """

    def __init__(self, export_to: Exporter) -> None:
        self._counted = _Counted(export_to)
        self._queue = BatchSpanProcessor(self._counted, max_queue_size=MAX_QUEUED, max_export_batch_size=SENT_TOGETHER)
        self._num_sent = 0
        self.num_refused = 0
        """Spans for which there was no room."""

    @property
    def num_dropped(self) -> int:
        return self.num_refused + self._counted.num_lost

    def send(self, tree: SpanTree) -> bool:
        """Takes a tree. Returns False if there is no room, and counts its spans as dropped. What it is planned from must not
        change any more.
        """
        if self._num_sent - self._counted.num_taken >= MAX_QUEUED:
            self.num_refused += sum(1 for _ in tree.made())
            return False
        self._num_sent += 1
        self._queue.on_end(tree)  # type: ignore[arg-type]  # it reads `context`
        return True

    def shutdown(self) -> None:
        self._queue.shutdown()  # type: ignore[no-untyped-call]
