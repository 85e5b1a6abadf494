"""A batch through the openai client's own calls, and one trace from HTTP to the ledger at a real OTLP receiver."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Iterator

import pytest
from otlp import Collector

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
def collector() -> Iterator[Collector]:
    made = Collector()
    thread = threading.Thread(target=made.server.serve_forever, daemon=True)
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


@pytest.mark.timeout(120)
def test_one_trace_from_http_to_the_ledger_arrives_at_a_collector(start_server, collector):
    spans = collector.spans
    server = start_server(
        env={
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint,
            "HEADGATE_TRACE_RATIO": "1.0",
            "OTEL_BSP_SCHEDULE_DELAY": "200",
        }
    )
    secret = "canary-in-the-prompt"
    server.client().chat.completions.create(
        model=server.model, messages=[{"role": "user", "content": secret}], max_tokens=8
    )
    below = {"admit", "dispatch", f"chat {server.model}", "queue", "prefill", "decode", "settle", "ship"}
    wanted = {"POST /v1/chat/completions", *below}
    collector.wait_for(lambda spans: wanted <= {s.name for s in spans}, 60)
    (root,) = [s for s in spans if s.name == "POST /v1/chat/completions"]
    trace = [s for s in spans if s.trace_id == root.trace_id]
    assert {s.name for s in trace} >= wanted
    assert root.parent_span_id == b""
    by_id = {s.span_id: s for s in trace}
    assert all(s.parent_span_id in by_id for s in trace if s is not root), "no span hangs in the air"
    assert all(s.start_time_unix_nano <= s.end_time_unix_nano for s in trace)
    assert secret not in str(spans)
    assert server.ready["api_key"] not in str(spans)
