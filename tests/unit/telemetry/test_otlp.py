"""Spans as OTLP's messages are those that the SDK's encoder makes, and a body is sent again only where OTLP wants that."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from gateway.telemetry import otlp
from gateway.telemetry.made_span import MadeSpan
from gateway.telemetry.spans import PlannedSpan

SAMPLED = TraceFlags(TraceFlags.SAMPLED)
KINDS = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}
ATTRIBUTES = {
    "text": "a" * 127,
    "long": "ü" * 5000,
    "empty": "",
    "yes": True,
    "no": False,
    "number": 2**62,
    "below": -1,
    "share": 0.5,
    "list": ["stop", "length"],
    "none": 0,
}


TRACE = 2**127 + 7


def context(number: int, *, is_remote: bool = False) -> SpanContext:
    return SpanContext(TRACE, number, is_remote=is_remote, trace_flags=SAMPLED)


def made() -> list[MadeSpan]:
    server = PlannedSpan("POST /v1/chat/completions", "server", 10, 90, dict(ATTRIBUTES), error="internal")
    client = PlannedSpan("chat llama", "client", 20, 80, {}, [("first_token", 30, {"step": 4}), ("parked", 40, {})])
    return [
        MadeSpan(server, TRACE, 1, 9, True, [context(5, is_remote=True)]),
        MadeSpan(client, TRACE, 2, 1),
        MadeSpan(PlannedSpan("settle", "internal", 80, 2**63), TRACE, 3),
    ]


def by_the_sdk(one: MadeSpan, resource: Resource) -> ReadableSpan:
    planned = one.planned
    return ReadableSpan(
        planned.name,
        context(one.span_id),
        context(one.parent_id, is_remote=one.is_parent_remote) if one.parent_id else None,
        resource,
        one.attributes,
        [Event(name, given, at) for name, at, given in planned.events],
        [Link(link) for link in one.links],
        KINDS[planned.kind],
        status=Status(StatusCode.ERROR if planned.error else StatusCode.UNSET),
        start_time=planned.start_ns,
        end_time=planned.end_ns,
        instrumentation_scope=InstrumentationScope("headgate"),
    )


def test_a_body_says_what_the_sdks_encoder_says() -> None:
    resource = Resource({"service.name": "headgate-gateway", "service.instance.id": "gateway-3"})
    found = ExportTraceServiceRequest.FromString(otlp.encoded(made(), resource.attributes, "headgate"))
    wanted = ExportTraceServiceRequest.FromString(
        encode_spans([by_the_sdk(one, resource) for one in made()]).SerializeToString()
    )
    assert [str(span) for span in found.resource_spans[0].scope_spans[0].spans] == [
        str(span) for span in wanted.resource_spans[0].scope_spans[0].spans
    ]
    assert found == wanted


VALUES = st.one_of(
    st.text(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.lists(st.text(min_size=1)),
)


def values(of: Any) -> dict[str, Any]:
    """The attributes of a resource, a span or an event."""
    found = {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in of.attributes}
    return {
        name: [item.string_value for item in value.values] if hasattr(value, "values") else value
        for name, value in found.items()
    }


@given(told=st.dictionaries(st.text(min_size=1), VALUES), resource=st.dictionaries(st.text(min_size=1), st.text()))
def test_protobuf_reads_every_value_as_it_was(told: dict[str, Any], resource: dict[str, str]) -> None:
    span = MadeSpan(PlannedSpan("a", "internal", 1, 2, told, [("b", 3, told)]), TRACE, 1)
    found = ExportTraceServiceRequest.FromString(otlp.encoded([span], resource, "headgate")).resource_spans[0]
    (read,) = found.scope_spans[0].spans
    assert values(found.resource) == resource
    assert values(read) == values(read.events[0]) == told


def test_half_a_surrogate_pair_costs_no_other_span() -> None:
    spans = [MadeSpan(PlannedSpan("a", "internal", 1, 2, {"model": "\ud800"}), TRACE, number) for number in (1, 2)]
    found = ExportTraceServiceRequest.FromString(otlp.encoded(spans, {}, "headgate"))
    assert len(found.resource_spans[0].scope_spans[0].spans) == 2


class Server:
    """It gives the answers in turn, the last one again and again, and keeps what it was sent."""

    def __init__(self, *answers: tuple[int, dict[str, str]]) -> None:
        self.bodies: list[tuple[dict[str, str], bytes]] = []
        outer, left = self, list(answers)

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                outer.bodies.append(({name.lower(): value for name, value in self.headers.items()}, body))
                status, headers = left.pop(0) if len(left) > 1 else left[0]
                self.send_response(status)
                for name, value in {"content-length": "0", **headers}.items():
                    self.send_header(name, value)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()
        self.environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self.server.server_port}/"}

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    started: list[Server] = []
    yield started
    for server in started:
        server.close()


def test_what_a_busy_collector_did_not_take_is_sent_again(servers: list[Server]) -> None:
    server = Server((503, {"retry-after": "0"}), (429, {"retry-after": "0"}), (200, {}))
    servers.append(server)
    collector = otlp.Collector(server.environ)
    assert collector.send(b"spans")
    assert [body for _, body in server.bodies] == [b"spans"] * 3
    collector.close()


@pytest.mark.parametrize("status", [400, 401, 404, 500])
def test_a_refusal_is_final(servers: list[Server], status: int) -> None:
    server = Server((status, {"retry-after": "0"}))
    servers.append(server)
    collector = otlp.Collector(server.environ)
    assert not collector.send(b"spans")
    assert len(server.bodies) == 1
    collector.close()


def test_a_wait_beyond_the_time_limit_is_not_begun(servers: list[Server]) -> None:
    server = Server((503, {"retry-after": "3600"}))
    servers.append(server)
    collector = otlp.Collector({**server.environ, "OTEL_EXPORTER_OTLP_TIMEOUT": "5"})
    assert not collector.send(b"spans")
    assert len(server.bodies) == 1
    collector.close()


def test_the_standard_variables_hold_and_those_for_traces_first(servers: list[Server]) -> None:
    server = Server((200, {}))
    servers.append(server)
    own = {
        "OTEL_EXPORTER_OTLP_HEADERS": "x-all=1",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "authorization=Basic%20abc,x-team=llm",
        "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
    }
    collector = otlp.Collector({**server.environ, **own})
    assert collector.send(b"spans")
    ((headers, body),) = server.bodies
    assert (headers["authorization"], headers["x-team"], headers["content-type"]) == (
        "Basic abc",
        "llm",
        "application/x-protobuf",
    )
    assert "x-all" not in headers
    assert headers["content-encoding"] == "gzip"
    assert otlp.gzip.decompress(body) == b"spans"
    collector.close()


def test_an_end_cuts_the_wait_between_tries(servers: list[Server]) -> None:
    server = Server((503, {"retry-after": "60"}))
    servers.append(server)
    collector = otlp.Collector({**server.environ, "OTEL_EXPORTER_OTLP_TIMEOUT": "600"})
    sent: list[bool] = []
    thread = threading.Thread(target=lambda: sent.append(collector.send(b"spans")))
    thread.start()
    collector.close()
    thread.join(60)
    assert sent == [False]
