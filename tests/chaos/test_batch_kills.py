"""SIGKILL under a running batch, with everything real: no line lost, none doubled, none charged twice."""

from __future__ import annotations

import io
import json
import os
import signal
import time
from pathlib import Path

import pytest
from load import stretched

NUM_LINES = 80


def children(pid: int) -> list[int]:
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def celery_children(jobs: int) -> list[int]:
    return [pid for worker in children(jobs) for pid in children(worker)]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_killed_celery_children_and_a_killed_gateway_cost_time_only(start_server):
    server = start_server(env={"HEADGATE_TEST_TIME_SCALE": "0.1"})
    tenant, key = server.tenant_key("batcher")
    client = server.client(key)
    lines = [
        {
            "custom_id": f"line-{i}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": server.model,
                "max_tokens": 48,
                "ignore_eos": True,
                "messages": [{"role": "user", "content": f"What is module {i}?"}],
            },
        }
        for i in range(NUM_LINES)
    ]
    content = "\n".join(json.dumps(line) for line in lines).encode()
    file = client.files.create(file=("work.jsonl", io.BytesIO(content)), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")

    def wait_for(num_done: int) -> None:
        deadline = time.monotonic() + stretched(90)
        while True:
            now = server.client(key).batches.retrieve(batch.id)
            if now.request_counts.completed >= num_done or now.status == "completed":
                return
            assert time.monotonic() < deadline, now
            time.sleep(0.05)

    killed = 0
    for num_done, kind in ((5, "child"), (25, "gateway"), (45, "child")):
        wait_for(num_done)
        (jobs,), (gateway,) = server.ready["pids"]["jobs"], server.ready["pids"]["gateway"]
        for pid in celery_children(jobs) if kind == "child" else [gateway]:
            os.kill(pid, signal.SIGKILL)
            killed += 1
        if kind == "gateway":
            deadline = time.monotonic() + stretched(30)
            while server.ready["pids"]["gateway"] == [gateway]:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            time.sleep(2)
    assert killed >= 3
    wait_for(NUM_LINES)
    while (batch := client.batches.retrieve(batch.id)).status != "completed":
        time.sleep(0.1)
    assert batch.request_counts.failed == 0, batch
    output = [json.loads(text) for text in client.files.content(batch.output_file_id).text.splitlines()]
    assert [result["custom_id"] for result in output] == [f"line-{i}" for i in range(NUM_LINES)]
    billed = sum(result["response"]["body"]["usage"]["total_tokens"] for result in output)
    server.verify_books()
    rows = server.sql(
        "SELECT line_no, COUNT(*), SUM(cache_read + cache_write + uncached + output) FROM ledger_entry"
        " WHERE tenant_id = ? AND kind = 'settle' GROUP BY line_no",
        tenant,
    )
    assert [row[1] for row in rows] == [1] * NUM_LINES
    assert sum(row[2] for row in rows) == billed == batch.usage.total_tokens
