"""The choice of the requests that become spans, their ids, and their export. Spans are made after the request's end,
from its record (`spans.py`), and only for sampled requests; for the others only the marks are recorded.

Requests are sampled at the end (operations.md 1.5): every failure of ours, the slowest of each route and minute, the
ratio by trace id, and those that a continued parent samples. If the environment names no OTLP endpoint, nothing is
exported, but trace ids exist for logs and ledger.
"""

from __future__ import annotations

import asyncio
import heapq
import ipaddress
import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gateway.telemetry import names, spans
from gateway.telemetry.record import RequestRecord
from gateway.telemetry.spans import PlannedSpan

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

MAX_QUEUED_SPANS = 2048
NUM_SLOWEST = 50
MINUTE_S = 60.0
SHUTDOWN_S = 5.0
SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_KINDS = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}
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
    return OTLPSpanExporter()


class Tracing:
    """The tracing of one process. All methods but `close` are called on the loop."""

    def __init__(
        self,
        ratio: float,
        parents_from: Sequence[Network],
        export_to: SpanExporter | None,
        *,
        slot: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bound = TraceIdRatioBased.get_bound_for_rate(ratio)
        self._parents_from = tuple(parents_from)
        self._out = _Out(export_to, slot) if export_to is not None else None
        self._slowest = _Slowest(clock)

    def start(self, record: RequestRecord) -> None:
        """Gives the request its trace, once. The worker receives `record.outgoing_traceparent`. Its flag can only say
        what is known now: the ratio, or the continued parent's flag.
        """
        if record.outgoing_traceparent:
            return
        parent = self._continued(record)
        trace_id = parent.trace_id if parent else _ids.generate_trace_id()
        sampled = self._by_ratio(trace_id) or (parent is not None and parent.trace_flags.sampled)
        record.outgoing_traceparent = f"00-{trace_id:032x}-{_ids.generate_span_id():016x}-{int(sampled):02x}"

    def observe(self, record: RequestRecord) -> None:
        """Observes ended requests."""
        if self._out is None or record.route in ("/livez", "/readyz", "/metrics"):
            return
        self.start(record)
        if record.outgoing_traceparent.endswith("01") or spans.failed(record):
            self._export(record)
        else:
            self._slowest.offer(record)
        self.tick()

    def tick(self) -> None:
        """Exports the slowest requests of a minute that is over. It is called from time to time."""
        for record in self._slowest.ended():
            self._export(record)

    @property
    def num_dropped(self) -> int:
        """The number of spans that were dropped because the queue was full."""
        return self._out.num_dropped if self._out else 0

    async def close(self) -> None:
        """Sends the waiting spans, for at most `SHUTDOWN_S`: a collector that does not answer cannot delay the exit."""
        if self._out is None:
            return
        for record in self._slowest.all():
            self._export(record)
        # The thread is a daemon: the exporter's own retries must not outlive the process.
        thread = threading.Thread(target=self._out.shutdown, daemon=True)
        thread.start()
        await asyncio.to_thread(thread.join, SHUTDOWN_S)

    def _by_ratio(self, trace_id: int) -> bool:
        return (trace_id & TraceIdRatioBased.TRACE_ID_LIMIT) < self._bound

    def _continued(self, record: RequestRecord) -> SpanContext | None:
        """Returns the client's context, if contexts from its address are continued."""
        if not self._parents_from or not record.traceparent:
            return None
        try:
            address = ipaddress.ip_address(record.peer.partition("%")[0])
        except ValueError:
            return None
        if not any(address in network for network in self._parents_from):
            return None
        return parse(record.traceparent)

    def _export(self, record: RequestRecord) -> None:
        assert self._out is not None
        own = parse(record.outgoing_traceparent)
        assert own is not None
        parent = self._continued(record)
        client = None if parent else parse(record.traceparent)
        self._out.send(spans.plan(record), own, parent, client)


def parse(traceparent: str) -> SpanContext | None:
    """Parses a W3C trace context; None if it is missing or malformed."""
    if not traceparent:
        return None
    found = _W3C.extract({"traceparent": traceparent}, Context())
    context = get_current_span(found).get_span_context()
    return context if context.is_valid else None


class _Slowest:
    """The slowest requests of each route in the present minute; the smallest first."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until = clock() + MINUTE_S
        self._heaps: dict[str, list[tuple[float, int, RequestRecord]]] = {}
        self._order = itertools.count()

    def offer(self, record: RequestRecord) -> None:
        heap = self._heaps.setdefault(record.route, [])
        entry = (record.offset_ms("last_byte") or 0.0, next(self._order), record)
        if len(heap) < NUM_SLOWEST:
            heapq.heappush(heap, entry)
        elif entry > heap[0]:
            heapq.heapreplace(heap, entry)

    def ended(self) -> list[RequestRecord]:
        return self.all() if self._clock() >= self._until else []

    def all(self) -> list[RequestRecord]:
        """Takes everything and begins the next minute."""
        self._until = self._clock() + MINUTE_S
        heaps, self._heaps = self._heaps, {}
        return [record for heap in heaps.values() for _, _, record in heap]


class _Counted(SpanExporter):
    """Counts the spans that left the queue, so that the queue's length is known without looking inside it."""

    def __init__(self, inner: SpanExporter) -> None:
        self._inner = inner
        self.num_taken = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.num_taken += len(spans)
        return self._inner.export(spans)

    def shutdown(self) -> None:
        self._inner.shutdown()


class _Out:
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
        self.num_dropped = 0

    def send(self, root: PlannedSpan, own: SpanContext, parent: SpanContext | None, client: SpanContext | None) -> None:
        num_spans = _size(root)
        if self._num_sent - self._counted.num_taken + num_spans > MAX_QUEUED_SPANS:
            self.num_dropped += num_spans
            return
        self._num_sent += num_spans
        self._make(root, own, parent, (Link(client),) if client else ())

    def _make(
        self, planned: PlannedSpan, own: SpanContext, parent: SpanContext | None, links: tuple[Link, ...]
    ) -> None:
        # The worker was sent the id of the span that represents its work.
        span_id = own.span_id if planned.kind == "client" else _ids.generate_span_id()
        context = SpanContext(own.trace_id, span_id, is_remote=False, trace_flags=SAMPLED)
        attributes, status = planned.attributes, _UNSET
        if planned.error:
            attributes, status = {**attributes, names.ERROR_TYPE: planned.error}, _FAILED
        for child in planned.children:
            self._make(child, own, context, ())
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
