"""The choice of the requests that become spans, their ids, and their export. Spans are made after the request's end,
from its record (`spans.py`), and only for sampled requests; for the others only the marks are recorded.

Requests are sampled at the end (operations.md 1.5): every failure of ours, the slowest of each route and minute, the
ratio by trace id, and those that a continued parent samples. The span `ship` follows when SQL has the request's ending.
If the environment names no OTLP endpoint, nothing is exported, but trace ids exist for logs and ledger.
"""

from __future__ import annotations

import asyncio
import heapq
import ipaddress
import itertools
import os
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, TraceIdRatioBased
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gateway.telemetry import names, spans
from gateway.telemetry.record import RequestRecord
from gateway.telemetry.spans import PlannedSpan

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

MAX_QUEUED_SPANS = 2048
MAX_EVENTS = 1024
"""More events than any span has: the worker's and the lease's are bounded."""
MAX_UNSHIPPED = 2048
MAX_SHIP_ROUNDS = 2048
"""At five to twenty rounds a second they tell of more than the minute for which the slowest requests wait."""
NUM_SLOWEST = 50
MINUTE_S = 60.0
SHUTDOWN_S = 5.0
SAMPLED = TraceFlags(TraceFlags.SAMPLED)
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
        self._rounds: deque[tuple[int, int]] = deque(maxlen=MAX_SHIP_ROUNDS)
        """Rounds of the shipper: SQL has what was durable at the first of the two times since the second one."""
        self._unshipped: deque[tuple[int, RequestRecord]] = deque()
        """Exported requests whose `ship` is still to come, with the time of their settlement."""

    def start(self, record: RequestRecord) -> None:
        """Gives the request its trace, once, and the ids of its own span and of the worker's. The flag can only say what
        is known now: the ratio, or the continued parent's flag.
        """
        if record.outgoing_traceparent:
            return
        parent = self._continued(record)
        trace_id = parent.trace_id if parent else _ids.generate_trace_id()
        sampled = self._by_ratio(trace_id) or (parent is not None and parent.trace_flags.sampled)
        trace, flags = f"00-{trace_id:032x}-", f"-{int(sampled):02x}"
        record.outgoing_traceparent = f"{trace}{_ids.generate_span_id():016x}{flags}"
        record.worker_traceparent = f"{trace}{_ids.generate_span_id():016x}{flags}"

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

    def shipped(self, asked_mono_ns: int) -> None:
        """Hears that SQL has every ending that was durable at this moment. The shipper calls it after each round."""
        if self._out is None:
            return
        self._rounds.append((asked_mono_ns, time.monotonic_ns()))
        while self._unshipped and self._unshipped[0][0] <= asked_mono_ns:
            _, record = self._unshipped.popleft()
            self._send_ship(self._out, record)

    @property
    def num_dropped(self) -> int:
        """The number of spans that were dropped: the queue was full, or the collector did not take them."""
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
        parent = self._continued(record)
        client = None if parent else parse(record.traceparent)
        if not self._out.send(spans.plan(record), _Ids.of(record), parent, [Link(client)] if client else []):
            return
        if record.settled_mono_ns is None:
            return
        if self._rounds and self._rounds[-1][0] >= record.settled_mono_ns:
            self._send_ship(self._out, record)
        elif len(self._unshipped) < MAX_UNSHIPPED:
            self._unshipped.append((record.settled_mono_ns, record))
        else:
            self._out.num_refused += 1

    def _send_ship(self, out: _Out, record: RequestRecord) -> None:
        """Sends the span of a settled request that SQL has."""
        assert record.settled_mono_ns is not None
        _, shipped_ns = self._rounds[bisect_left(self._rounds, (record.settled_mono_ns, 0))]
        ids = _Ids.of(record)
        _ = out.send(spans.ship(record, shipped_ns), ids, ids.server)


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
class _Ids:
    """The two spans of a request whose ids were told before the spans were made."""

    server: SpanContext
    client: SpanContext

    @classmethod
    def of(cls, record: RequestRecord) -> _Ids:
        server, client = parse(record.outgoing_traceparent), parse(record.worker_traceparent)
        assert server is not None and client is not None
        return cls(server, client)

    def preset(self, kind: spans.Kind) -> int:
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


class _Out:
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

    def send(self, top: PlannedSpan, ids: _Ids, parent: SpanContext | None, links: Sequence[Link] = ()) -> bool:
        """Takes a span with those below it. Returns False if there is no room, and counts them as dropped."""
        num_spans = _size(top)
        if self._num_sent - self._counted.num_taken + num_spans > MAX_QUEUED_SPANS:
            self.num_refused += num_spans
            return False
        self._num_sent += num_spans
        self._new_ids.trace_id = ids.server.trace_id
        self._make(top, ids, parent, links)
        return True

    def _make(self, planned: PlannedSpan, ids: _Ids, parent: SpanContext | None, links: Sequence[Link]) -> None:
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
