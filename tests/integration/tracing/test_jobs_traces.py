"""Trace context through Celery: ring → look in one trace; chunks and lines are traces of their own, joined by links."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from fakes import ScriptedWorker
from gateways import MODEL, running_gateway

pytestmark = pytest.mark.rest


async def test_batch_chunk_and_lines_are_linked(tmp_path: Path, redis_socket, redis_url, collector, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")  # only a flush at the end can bring anything
    broker_url = f"redis+socket://{redis_socket}?virtual_host=1"
    body = {"model": MODEL, "messages": [{"role": "user", "content": "canary"}], "max_tokens": 2}
    lines = [{"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": body} for i in range(3)]
    content = "\n".join(json.dumps(line) for line in lines).encode()
    async with (
        ScriptedWorker(tmp_path / "w.sock", redis_url=redis_url),
        running_gateway(tmp_path / "home", redis_url, broker_url=broker_url, trace_ratio=1.0) as gateway,
    ):
        await gateway.workers(1)
        env = {
            **os.environ,
            "HEADGATE_HOME": str(gateway.settings.home),
            "HEADGATE_URL": gateway.url,
            "HEADGATE_BROKER_URL": broker_url,
            "HEADGATE_TEST_TIME_SCALE": "0.05",
        }
        with (tmp_path / "jobs.log").open("wb") as log:
            jobs = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "workers.jobs", env=env, stdout=log, stderr=log
            )
        try:
            async with gateway.client() as client:
                while not list((gateway.settings.home / "run").glob("*.pulse")):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                file = await client.files.create(file=("a", io.BytesIO(content)), purpose="batch")
                batch = await client.batches.create(
                    input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
                )
                while batch.status != "completed":
                    assert batch.status != "failed", batch
                    await asyncio.sleep(0.05)
                    batch = await client.batches.retrieve(batch.id)
        finally:
            jobs.send_signal(signal.SIGTERM)
            await asyncio.wait_for(jobs.wait(), 40)
    spans = collector.spans
    (created,) = [s for s in spans if s.name == "POST /v1/batches"]
    looks = [s for s in spans if s.name == "look"]
    assert created.trace_id in {look.trace_id for look in looks}, "the ring's header carries the trace"
    (chunk,) = [s for s in spans if s.name == "batch chunk"]
    assert chunk.parent_span_id == b""
    assert [link.trace_id for link in chunk.links] == [created.trace_id]
    requests = [s for s in spans if s.name == "POST /v1/chat/completions"]
    assert len(requests) == 3
    assert len({s.trace_id for s in requests}) == 3
    for request in requests:
        assert [(link.trace_id, link.span_id) for link in request.links] == [(chunk.trace_id, chunk.span_id)]
    services = {a.value.string_value for r in collector.resources for a in r.attributes if a.key == "service.name"}
    assert services == {"headgate-gateway", "headgate-jobs"}
    assert "canary" not in str(spans)
