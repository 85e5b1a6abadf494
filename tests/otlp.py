"""A real OTLP/HTTP receiver, and what spans that arrived there say."""

from __future__ import annotations

import gzip
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from load import stretched
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    def __init__(self) -> None:
        self.spans: list = []
        self.resources: list = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                outer.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    def take(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            self.resources.append(resource.resource)
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)

    def wait_for(self, done: Callable[[list], bool], limit_s: float = 10.0) -> list:
        deadline = time.monotonic() + stretched(limit_s)
        while not done(self.spans) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert done(self.spans), [span.name for span in self.spans]
        return self.spans


def _value(value: object) -> object:
    return getattr(value, value.WhichOneof("value"))


def attributes(of: object) -> dict:
    """The attributes of a span, an event or a link."""
    return {a.key: _value(a.value) for a in of.attributes}


def events(span: Span, name: str) -> list[dict]:
    return [attributes(event) for event in span.events if event.name == name]


def kind(span: Span) -> str:
    return Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_")


def links(span: Span) -> list[tuple[str, str]]:
    """Trace and span ids in hexadecimal digits."""
    return [(link.trace_id.hex(), link.span_id.hex()) for link in span.links]
