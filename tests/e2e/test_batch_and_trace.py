"""A batch through the openai client's own calls, and one trace from HTTP to settle at a real OTLP receiver."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

NUM_LINES, NUM_INVALID = 100, 10


def lines(model: str) -> list[dict]:
    return [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": model,
                "messages": [{"role": "user", "content": f"What is module {number}?"}],
                "max_tokens": -1 if number % 10 == 3 else 4,
            },
        }
        for number in range(NUM_LINES)
    ]


@pytest.mark.timeout(180)
def test_a_batch_with_invalid_lines_ends_with_one_result_per_line(server):
    tenant, key = server.tenant_key("batcher")
    client = server.client(key)
    sent = lines(server.model)
    content = "\n".join(json.dumps(line) for line in sent).encode()
    file = client.files.create(file=("work.jsonl", io.BytesIO(content)), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    deadline = time.monotonic() + 150
    while batch.status not in ("completed", "failed", "expired", "cancelled") and time.monotonic() < deadline:
        time.sleep(0.3)
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed", batch
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (100, 90, 10)

    output = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    errors = [json.loads(line) for line in client.files.content(batch.error_file_id).text.splitlines()]
    assert len(output) == NUM_LINES - NUM_INVALID
    assert len(errors) == NUM_INVALID
    assert {r["custom_id"] for r in output + errors} == {line["custom_id"] for line in sent}
    assert all(r["response"]["status_code"] == 200 for r in output)
    assert all(r["response"]["status_code"] == 400 for r in errors)
    billed = sum(r["response"]["body"]["usage"]["total_tokens"] for r in output)
    server.verify_books()
    (posted,) = server.sql(
        "SELECT SUM(cache_read + cache_write + uncached + output) FROM ledger_entry WHERE tenant_id = ? AND kind = 'settle'",
        tenant,
    )[0]
    assert posted == billed


@pytest.fixture
def collector() -> Iterator[tuple[str, list]]:
    """A real OTLP/HTTP receiver: (endpoint, spans as they arrive)."""
    spans: list = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            request = ExportTraceServiceRequest.FromString(body)
            spans.extend(s for r in request.resource_spans for scope in r.scope_spans for s in scope.spans)
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    receiver = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=receiver.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{receiver.server_port}", spans
    receiver.shutdown()
    thread.join()
    receiver.server_close()


@pytest.mark.timeout(120)
def test_one_trace_from_http_to_settle_arrives_at_a_collector(start_server, collector):
    endpoint, spans = collector
    server = start_server(
        env={"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "HEADGATE_TRACE_RATIO": "1.0", "OTEL_BSP_SCHEDULE_DELAY": "200"}
    )
    secret = "canary-in-the-prompt"
    server.client().chat.completions.create(
        model=server.model, messages=[{"role": "user", "content": secret}], max_tokens=8
    )
    wanted = {"POST /v1/chat/completions", "admit", f"chat {server.model}", "queue", "prefill", "decode", "settle"}
    deadline = time.monotonic() + 15
    while not wanted <= {s.name for s in spans} and time.monotonic() < deadline:
        time.sleep(0.1)
    assert wanted <= {s.name for s in spans}
    (root,) = [s for s in spans if s.name == "POST /v1/chat/completions"]
    trace = [s for s in spans if s.trace_id == root.trace_id]
    assert {s.name for s in trace} >= wanted
    assert root.parent_span_id == b""
    by_id = {s.span_id: s for s in trace}
    assert all(s.parent_span_id in by_id for s in trace if s is not root), "no span hangs in the air"
    assert all(s.start_time_unix_nano <= s.end_time_unix_nano for s in trace)
    assert secret not in str(spans)
    assert server.ready["api_key"] not in str(spans)
