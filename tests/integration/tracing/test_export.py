"""From ended requests to a real OTLP receiver: which are sampled, whose trace they join, what never leaves."""

from __future__ import annotations

import ipaddress
import time

import pytest
from load import stretched

from gateway.telemetry import span_export, tracing
from gateway.telemetry.record import RequestRecord
from workers.protocol.messages import TimelineEvent

pytestmark = pytest.mark.rest

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def exporter(collector, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    return span_export.exporter(slot=3)


def ended(request_id: str = "req_1", ms: int = 100, **fields) -> RequestRecord:
    record = RequestRecord(request_id, "POST", route="/v1/chat/completions", **fields)
    record.status = record.status or 200
    record.model = "llama"
    names = ("accepted", "authenticated", "tokenized", "admitted", "dispatched", "finished", "settled", "last_byte")
    record.marks = [(name, ms * 1_000_000 * i // 7) for i, name in enumerate(names)]
    record.worker_timeline = (
        TimelineEvent("queued", 0),
        TimelineEvent("matched", 10),
        TimelineEvent("first_token", 20),
        TimelineEvent("finished", 30),
    )
    return record


async def test_one_whole_trace_arrives(collector, exporter):
    traces = tracing.Tracing(1.0, (), exporter)
    record = ended()
    traces.start(record)
    told = span_export.parse(record.outgoing_traceparent)
    assert told.trace_flags.sampled
    traces.observe(record)
    await traces.close()
    spans = {span.name: span for span in collector.spans}
    below = {"admit", "dispatch", "chat llama", "queue", "prefill", "decode", "settle"}
    assert set(spans) == {"POST /v1/chat/completions", *below}
    assert {span.trace_id for span in collector.spans} == {told.trace_id.to_bytes(16)}
    assert spans["POST /v1/chat/completions"].span_id == told.span_id.to_bytes(8), "jobs were told this span"
    assert spans["POST /v1/chat/completions"].parent_span_id == b""
    assert spans["admit"].parent_span_id == spans["POST /v1/chat/completions"].span_id
    assert spans["decode"].parent_span_id == spans["chat llama"].span_id
    resource = {a.key: a.value.string_value for a in collector.resources[0].attributes}
    assert resource["service.instance.id"] == "gateway-3"


async def test_a_strangers_trace_becomes_a_link_and_cannot_force_sampling(collector, exporter):
    traces = tracing.Tracing(0.0, (), exporter)
    quiet = ended("req_quiet", traceparent=CLIENT, peer="203.0.113.9")
    traces.start(quiet)
    assert quiet.outgoing_traceparent.endswith("-00")
    failed = ended("req_failed", traceparent=CLIENT, peer="203.0.113.9", status=500)
    traces.observe(failed)
    await traces.close()
    (root,) = [s for s in collector.spans if s.name.startswith("POST")]
    assert root.trace_id.hex() not in CLIENT
    assert [link.trace_id.hex() for link in root.links] == [CLIENT.split("-")[1]]


async def test_a_listed_caller_is_continued_with_its_flag(collector, exporter):
    networks = (ipaddress.ip_network("10.0.0.0/8"),)
    traces = tracing.Tracing(0.0, networks, exporter)
    traces.observe(ended(traceparent=CLIENT, peer="10.1.2.3"))
    await traces.close()
    (root,) = [s for s in collector.spans if s.name.startswith("POST")]
    assert root.trace_id.hex() == CLIENT.split("-")[1]
    assert root.parent_span_id.hex() == CLIENT.split("-")[2]
    assert not root.links


@pytest.mark.parametrize("garbage", ["", "00-xyz", "00-" + "0" * 32 + "-b7ad6b7169203331-01", "ff" * 40])
async def test_a_malformed_parent_is_as_none(collector, exporter, garbage):
    traces = tracing.Tracing(1.0, (ipaddress.ip_network("10.0.0.0/8"),), exporter)
    traces.observe(ended(traceparent=garbage, peer="10.1.2.3"))
    await traces.close()
    (root,) = [s for s in collector.spans if s.name.startswith("POST")]
    assert root.parent_span_id == b""
    assert not root.links


async def test_errors_always_leave_and_the_rest_by_ratio(collector, exporter):
    traces = tracing.Tracing(0.0, (), exporter)
    traces.observe(ended("req_ok"))
    traces.observe(ended("req_refused", status=429))
    traces.observe(ended("req_failed", status=503, error_code="overloaded"))
    traces.observe(ended("req_cut", status=200, error_code="upstream_lost"))
    spans = collector.wait_for(lambda spans: len(spans) >= 16, 8)
    roots = [s for s in spans if s.name.startswith("POST")]
    assert [s.status.code for s in roots] == [2, 2]
    assert {request_id(s) for s in roots} == {"req_failed", "req_cut"}
    await traces.close()


async def test_the_slowest_of_a_minute_leave_when_it_is_over(collector, exporter):
    now = [1000.0]
    traces = tracing.Tracing(0.0, (), exporter, clock=lambda: now[0])
    for number in range(200):
        traces.observe(ended(f"req_{number}", ms=100 + number))
    assert not collector.spans
    now[0] += 61
    traces.export_slowest()
    await traces.close()
    roots = [s for s in collector.spans if s.name.startswith("POST")]
    assert {request_id(s) for s in roots} == {f"req_{n}" for n in range(150, 200)}


@pytest.mark.slow
async def test_a_dead_collector_costs_the_requests_nothing(monkeypatch, free_port):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port}")
    monkeypatch.setattr(tracing, "SHUTDOWN_S", 0.2)
    traces = tracing.Tracing(1.0, (), span_export.exporter())
    spent = []
    for _ in range(3):  # of which one at least has the machine for itself
        started = time.perf_counter()
        for number in range(600):
            traces.observe(ended(f"req_{number}"))
        spent.append(time.perf_counter() - started)
    assert traces.num_dropped > 1000, "a full queue drops and counts"
    assert min(spent) < stretched(2.0)
    closing = time.perf_counter()
    await traces.close()
    assert time.perf_counter() - closing < stretched(2.0)


async def test_an_unsampled_request_makes_no_span(collector, exporter):
    traces = tracing.Tracing(0.0, (), exporter)
    for path in ("/livez", "/readyz", "/metrics"):
        record = ended(status=503)
        record.route = path
        traces.observe(record)
    await traces.close()
    assert not collector.spans


def test_without_an_endpoint_there_is_no_exporter(monkeypatch):
    assert span_export.exporter({}) is None
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}
    assert span_export.exporter({**endpoint, "OTEL_SDK_DISABLED": "true"}) is None
    assert span_export.exporter({**endpoint, "OTEL_TRACES_EXPORTER": "none"}) is None


async def test_without_an_exporter_every_request_has_a_trace_id_all_the_same():
    traces = tracing.Tracing(1.0, (), None)
    record = ended()
    traces.start(record)
    assert span_export.parse(record.outgoing_traceparent)
    traces.observe(record)
    await traces.close()


def request_id(span) -> str:
    (value,) = [a.value.string_value for a in span.attributes if a.key == "headgate.request.id"]
    return value
