"""A real OTLP/HTTP receiver."""

from __future__ import annotations

import gzip
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@pytest.fixture(autouse=True)
def nobody_exports_afterwards() -> Iterator[None]:
    """What is retried behind a test draws its jitter from the `random` that Hypothesis watches in later ones."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("Otel") or "(shutdown)" in thread.name:
            thread.join(20)


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
        deadline = time.monotonic() + limit_s
        while not done(self.spans) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert done(self.spans), [span.name for span in self.spans]
        return self.spans


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    thread = threading.Thread(target=made.server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


@pytest.fixture
def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
