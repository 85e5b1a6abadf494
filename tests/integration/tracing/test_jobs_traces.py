"""A batch through real Celery: batch, task, chunk and line are joined by parents and links, also where the worker of a line
dies."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from fakes import Fault, ScriptedWorker
from gateways import MODEL, running_gateway, until
from otlp import attributes, events, kind, links
from redis_db import emptied_broker

pytestmark = pytest.mark.rest

NUM_LINES = 4


def place(span) -> tuple[str, str]:
    """What a link to the span names."""
    return span.trace_id.hex(), span.span_id.hex()


async def test_batch_task_chunk_and_lines_find_each_other_although_a_worker_dies(
    tmp_path: Path, redis_socket, redis_url, collector, monkeypatch
):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")  # only a flush at the end can bring anything
    broker_url = emptied_broker(redis_socket)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "canary"}], "max_tokens": 20}
    lines = [
        {"custom_id": f"canary {i}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for i in range(NUM_LINES)
    ]
    content = "\n".join(json.dumps(line) for line in lines).encode()
    dying = ScriptedWorker(tmp_path / "w0.sock", redis_url=redis_url, fault=Fault("crash", after_tokens=3))
    settings = {"broker_url": broker_url, "trace_ratio": 1.0, "resume_s": 0.0}  # each line is tried again
    async with running_gateway(tmp_path / "home", redis_url, **settings) as gateway, dying:
        await gateway.workers(1)
        env = {
            **os.environ,
            "HEADGATE_HOME": str(gateway.settings.home),
            "HEADGATE_URL": gateway.url,
            "HEADGATE_BROKER_URL": broker_url,
            # A worker that is deaf for 60 s of this is killed with its spans, and a busy machine can stop it for 3 s.
            "HEADGATE_TEST_TIME_SCALE": "0.3",
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
                await until(lambda: dying.num_tokens_sent >= 3, 60)
                async with ScriptedWorker(tmp_path / "w1.sock", redis_url=redis_url, slot=1):
                    while batch.status != "completed":
                        assert batch.status != "failed", batch
                        await asyncio.sleep(0.05)
                        batch = await client.batches.retrieve(batch.id)
        finally:
            jobs.send_signal(signal.SIGTERM)
            await asyncio.wait_for(jobs.wait(), 40)
        said = (tmp_path / "jobs.log").read_text()
        assert jobs.returncode == 0, said
        assert '"level":"ERROR"' not in said, said
        assert batch.request_counts.completed == NUM_LINES
        await gateway.settled()
        paid = await gateway.sql("SELECT line_no, trace_id FROM ledger_entry WHERE kind = 'settle'")
        logged: list = []
        async with asyncio.timeout(60):
            while len([row for row in logged if row.status == 200]) < NUM_LINES:
                logged = await gateway.sql("SELECT trace_id, status FROM request_log WHERE batch_id IS NOT NULL")
    spans = collector.spans
    by_id = {span.span_id: span for span in spans}
    (created,) = [s for s in spans if s.name == "POST /v1/batches"]

    # Batch and tasks: the ring's header carries the batch's span, and each further ring that of its task.
    looks = [s for s in spans if s.name == "look"]
    assert created.span_id in {look.parent_span_id for look in looks}
    for look in looks:
        assert kind(look) == "CONSUMER"
        assert attributes(look)["messaging.system"] == "celery"
        assert attributes(look)["messaging.message.id"]
    for name in ("batch validate", "batch finalise"):
        found = [s for s in spans if s.name == name]
        assert len(found) == 1, (name, sorted(s.name for s in spans), said)
        (work,) = found
        assert by_id[work.parent_span_id].name == "look"
        assert links(work) == [place(created)]
        assert attributes(work)["headgate.batch.id"] == batch.id

    # Chunk, its batch and its task.
    (chunk,) = [s for s in spans if s.name == "batch chunk"]
    assert chunk.parent_span_id == b""
    assert links(chunk)[0] == place(created)
    (task,) = [look for look in looks if place(look) == links(chunk)[1]]
    assert links(task) == [place(chunk)]
    assert (attributes(chunk)["headgate.batch.chunk.claim"], attributes(chunk)["headgate.batch.chunk.left"]) == (
        1,
        "done",
    )

    # Chunk and lines: each try of a line is a root with a link to the chunk, and the chunk has a link to each try.
    tries = defaultdict(list)
    for root in sorted(spans, key=lambda s: s.start_time_unix_nano):
        if root.name == "POST /v1/chat/completions":
            assert root.parent_span_id == b""
            assert links(root) == [place(chunk)]
            assert attributes(root)["headgate.batch.id"] == batch.id
            tries[attributes(root)["headgate.batch.line_no"]].append(root)
    assert len(tries) == NUM_LINES
    told = {(link.trace_id.hex(), link.span_id.hex()): attributes(link) for link in chunk.links[2:]}
    for line_no, roots in tries.items():
        for root in roots:
            assert told.pop(place(root)) == {
                "headgate.batch.line_no": line_no,
                "http.response.status_code": attributes(root)["http.response.status_code"],
            }
    assert not told
    assert {row.line_no: row.trace_id for row in paid} == {no: roots[-1].trace_id.hex() for no, roots in tries.items()}

    assert {row.trace_id for row in logged} >= {row.trace_id for row in paid}

    # The worker that died took the first try of a line with it.
    lost = [root for roots in tries.values() for root in roots[:-1]]
    cut = [root for root in lost if attributes(root)["error.type"] == "upstream_lost"]
    # A line that is sent in the moment of the death ends with the same error, and no worker has a part in it.
    chats = [[s for s in spans if s.trace_id == root.trace_id and s.name == f"chat {MODEL}"] for root in cut]
    assert any(chats)
    for chat in (one for found in chats for one in found):
        assert events(chat, "worker_lost")
        assert attributes(chat)["headgate.worker.id"] == "worker-0"
    assert max(map(len, chats)) == 1
    services = {a.value.string_value for r in collector.resources for a in r.attributes if a.key == "service.name"}
    assert services == {"headgate-gateway", "headgate-jobs"}
    assert "canary" not in str(spans)
