"""The choice of the requests that become spans, and their ids. Spans are made after the request's end, from its record
(`spans.py`), and only for sampled requests; for the others only the marks are recorded. `span_export.py` sends them.

Requests are sampled at the end (operations.md 1.5): every failure of ours, the slowest of each route and minute, the
ratio by trace id, and those that a continued parent samples. The span `ship` follows when SQL has the request's ending.
If the environment names no OTLP endpoint, nothing is exported, but trace ids exist for logs and ledger.
"""

from __future__ import annotations

import asyncio
import heapq
import ipaddress
import itertools
import random
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from opentelemetry.trace import SpanContext

from gateway.telemetry import spans
from gateway.telemetry.made_span import Exporter
from gateway.telemetry.record import RequestRecord
from gateway.telemetry.span_export import SpanExport, SpanTree, TraceIds, parse

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

MAX_UNSHIPPED = 2048
MAX_SHIP_ROUNDS = 2048
"""At five to twenty rounds a second they tell of more than the minute for which the slowest requests wait."""
NUM_SLOWEST = 50
MINUTE_S = 60.0
SHUTDOWN_S = 5.0
_ids = RandomIdGenerator()


class Tracing:
    """The tracing of one process. All methods but `close` are called on the loop."""

    def __init__(
        self,
        ratio: float,
        parents_from: Sequence[Network],
        export_to: Exporter | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bound = TraceIdRatioBased.get_bound_for_rate(ratio)
        self._parents_from = tuple(parents_from)
        self._out = SpanExport(export_to) if export_to is not None else None
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
        trace_id = parent.trace_id if parent else _trace_id(record.started_ns)
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
        self.export_slowest()

    def export_slowest(self) -> None:
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
        links = [client] if client else []
        if not self._out.send(SpanTree(partial(spans.plan, record), TraceIds.of(record), parent, links)):
            return
        if record.settled_mono_ns is None:
            return
        if self._rounds and self._rounds[-1][0] >= record.settled_mono_ns:
            self._send_ship(self._out, record)
        elif len(self._unshipped) < MAX_UNSHIPPED:
            self._unshipped.append((record.settled_mono_ns, record))
        else:
            self._out.num_refused += 1

    def _send_ship(self, out: SpanExport, record: RequestRecord) -> None:
        """Sends the span of a settled request that SQL has."""
        assert record.settled_mono_ns is not None
        _, shipped_ns = self._rounds[bisect_left(self._rounds, (record.settled_mono_ns, 0))]
        ids = TraceIds.of(record)
        server = SpanContext(ids.trace_id, ids.server, is_remote=True)
        _ = out.send(SpanTree(partial(spans.ship, record, shipped_ns), ids, server))


def _trace_id(started_ns: int) -> int:
    """Returns a new trace id: 32 bits of Unix seconds, then 96 random ones, as AWS X-Ray has them. Rows of the request log
    that come together then stand together in the index of trace ids, too. Sampling by ratio reads the last 64 bits.
    """
    return (started_ns // 1_000_000_000 & 0xFFFF_FFFF) << 96 | random.getrandbits(96)


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
