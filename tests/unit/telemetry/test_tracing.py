"""The spans of ended requests on their way out: a collector that refuses or hangs costs spans, which are counted; shipping
follows when SQL has the ending."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence

import pytest
from prometheus_client import CollectorRegistry

from gateway.telemetry import span_export
from gateway.telemetry.made_span import MadeSpan
from gateway.telemetry.metrics import TracingMetrics
from gateway.telemetry.record import RequestRecord
from gateway.telemetry.span_export import parse
from gateway.telemetry.tracing import Tracing
from workers.protocol.messages import TimelineEvent

MS = 1_000_000
NAMES = ("accepted", "tokenized", "admitted", "routed", "dispatched", "finished", "settled", "last_byte")
SPANS_EACH = 8


class Receiver:
    """It refuses, or hangs until `open`, or takes."""

    def __init__(self, *, takes: bool = True) -> None:
        self.takes = takes
        self.open = threading.Event()
        self.open.set()
        self.spans: list[MadeSpan] = []

    def export(self, spans: Sequence[MadeSpan]) -> bool:
        assert self.open.wait(100)
        if self.takes:
            self.spans += spans
        return self.takes

    def close(self) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.open.set()


def ended(number: int = 0, **fields: object) -> RequestRecord:
    """A request that was accepted a second ago and settled 6 ms later."""
    accepted = time.monotonic_ns() - 10**9
    record = RequestRecord(f"req_{number}", "POST", started_mono_ns=accepted, route="/v1/chat/completions", **fields)
    record.status = record.status or 200
    record.model = "llama"
    record.marks = [(name, i * MS) for i, name in enumerate(NAMES)]
    record.worker_timeline = tuple(
        TimelineEvent(name, i * 100) for i, name in enumerate(("queued", "matched", "first_token", "finished"))
    )
    return record


def dropped(traces: Tracing) -> float | None:
    registry = CollectorRegistry()
    registry.register(TracingMetrics(traces))
    return registry.get_sample_value("headgate_trace_spans_dropped_total")


async def test_spans_that_the_collector_refuses_are_counted(receiver: Receiver) -> None:
    receiver.takes = False
    traces = Tracing(1.0, (), receiver)
    traces.observe(ended())
    await traces.close()
    assert traces.num_dropped == dropped(traces) == SPANS_EACH


async def test_a_request_whose_spans_cannot_be_planned_costs_no_other_its_own(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, num_asked = span_export.SpanTree.made, itertools.count()

    def broken(tree: span_export.SpanTree) -> Iterator[MadeSpan]:
        if next(num_asked) == 1:
            raise ValueError("a fault of ours")
        return made(tree)

    monkeypatch.setattr(span_export.SpanTree, "made", broken)
    traces = Tracing(1.0, (), receiver)
    for number in range(3):
        traces.observe(ended(number))
    await traces.close()
    assert len(receiver.spans) == 2 * SPANS_EACH
    assert traces.num_dropped == 1


async def test_a_collector_that_hangs_costs_spans_and_no_request_waits(receiver: Receiver) -> None:
    receiver.open.clear()
    traces = Tracing(1.0, (), receiver)
    num_requests = span_export.MAX_QUEUED + span_export.SENT_TOGETHER + 50
    for number in range(num_requests):
        traces.observe(ended(number))  # it returns although nothing is taken
    num_kept = num_requests * SPANS_EACH - traces.num_dropped
    most = (span_export.MAX_QUEUED + span_export.SENT_TOGETHER) * SPANS_EACH
    assert 0 < num_kept <= most, "what is waiting, and what was handed over before it hung"
    receiver.open.set()
    await traces.close()
    assert len(receiver.spans) == num_kept
    whole = {span.attributes["headgate.request.id"] for span in receiver.spans if span.planned.name.startswith("POST")}
    assert len(whole) * SPANS_EACH == num_kept, "a request is dropped as a whole"


async def test_shipping_is_told_when_sql_has_the_ending(receiver: Receiver) -> None:
    traces = Tracing(1.0, (), receiver)
    record = ended()
    settled = record.settled_mono_ns
    assert settled is not None
    traces.observe(record)
    traces.shipped(settled - 1)
    traces.shipped(settled + 1)
    traces.shipped(settled + 2)
    await traces.close()
    (ship,) = [span for span in receiver.spans if span.planned.name == "ship"]
    (root,) = [span for span in receiver.spans if not span.parent_id]
    assert ship.parent_id == root.span_id
    assert ship.trace_id == root.trace_id
    assert ship.planned.start_ns == record.started_ns + 6 * MS
    assert 10**9 <= ship.planned.end_ns - record.started_ns < 100 * 10**9


async def test_the_slowest_know_when_they_were_shipped_although_they_leave_later(receiver: Receiver) -> None:
    now = [0.0]
    traces = Tracing(0.0, (), receiver, clock=lambda: now[0])
    record = ended()
    traces.observe(record)
    assert record.settled_mono_ns is not None
    traces.shipped(record.settled_mono_ns)
    first = time.monotonic_ns()
    traces.shipped(time.monotonic_ns() + 60 * 10**9)
    now[0] += 61
    traces.export_slowest()
    await traces.close()
    (ship,) = [span for span in receiver.spans if span.planned.name == "ship"]
    assert ship.planned.end_ns - record.started_ns <= first - record.started_mono_ns, "the first round that had it"


async def test_a_request_that_was_never_settled_is_never_shipped(receiver: Receiver) -> None:
    traces = Tracing(1.0, (), receiver)
    record = ended(status=500)
    record.marks = [mark for mark in record.marks if mark[0] != "settled"]
    traces.observe(record)
    traces.shipped(time.monotonic_ns())
    await traces.close()
    assert not [span for span in receiver.spans if span.planned.name in ("settle", "ship")]


async def test_the_ids_that_were_told_are_those_of_the_spans(receiver: Receiver) -> None:
    traces = Tracing(1.0, (), receiver)
    record = ended()
    traces.start(record)
    own, work = parse(record.outgoing_traceparent), parse(record.worker_traceparent)
    assert own is not None
    assert work is not None
    traces.observe(record)
    await traces.close()
    by_name = {span.planned.name: span for span in receiver.spans}
    assert by_name["POST /v1/chat/completions"].span_id == own.span_id
    assert by_name["chat llama"].span_id == work.span_id
    assert {span.trace_id for span in receiver.spans} == {own.trace_id} == {work.trace_id}


async def test_a_stream_that_failed_after_its_head_leaves_at_ratio_0(receiver: Receiver) -> None:
    traces = Tracing(0.0, (), receiver)
    traces.observe(ended(1, status=200, error_code="upstream_lost"))
    traces.observe(ended(2))
    traces._slowest.all()  # as if others had been slower
    await traces.close()
    (root,) = [span for span in receiver.spans if not span.parent_id]
    assert root.attributes["headgate.request.id"] == "req_1"
    assert root.planned.error == "upstream_lost"


def test_an_unsampled_request_pays_one_clock_reading_and_one_append_for_a_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    record = ended()
    reads = []
    monkeypatch.setattr(time, "monotonic_ns", lambda: reads.append(1) or 5)
    num_marks = len(record.marks)
    record.mark("first_byte")
    assert (len(reads), len(record.marks)) == (1, num_marks + 1)
    traces = Tracing(0.0, (), None)
    traces.observe(record)
    traces.shipped(7)
    assert len(reads) == 1


def test_trace_ids_stand_in_the_order_of_their_seconds_and_are_sampled_by_ratio() -> None:
    traces = Tracing(0.25, (), None)
    records = [ended(number, started_ns=(10**9 + number) * 10**9) for number in range(2000)]
    for record in records:
        traces.start(record)
    ids = [record.outgoing_traceparent[3:35] for record in records]
    assert ids == sorted(ids)
    assert 400 < sum(record.outgoing_traceparent.endswith("01") for record in records) < 600
    at_once = [ended(number, started_ns=10**18) for number in range(100)]
    for record in at_once:
        traces.start(record)
    assert len({record.outgoing_traceparent[3:35] for record in at_once}) == 100
