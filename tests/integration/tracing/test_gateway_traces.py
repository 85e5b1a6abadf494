"""One request through the real gateway and a scripted worker: one trace from HTTP to settle at a real OTLP receiver."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
from fakes import ScriptedWorker
from gateways import MODEL, RunningGateway, running_gateway

from gateway.telemetry.tracing import parse

pytestmark = pytest.mark.rest

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CANARY = "canary in the prompt"
SPANS = {"POST /v1/chat/completions", "admit", f"chat {MODEL}", "queue", "prefill", "decode", "settle"}


@pytest.fixture
async def worker(tmp_path: Path, redis_url: str) -> AsyncIterator[ScriptedWorker]:
    async with ScriptedWorker(tmp_path / "w0.sock", redis_url=redis_url) as worker:
        yield worker


@pytest.fixture
async def traced(worker, tmp_path, redis_url, collector, monkeypatch):
    """Starts a gateway that exports to the collector; ends it before the test looks, so that all is flushed."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")

    def start(**settings):
        return running_gateway(tmp_path / "home", redis_url, **settings)

    return start


async def ask(gateway: RunningGateway, **options):
    await gateway.workers(1)
    async with gateway.client() as client:
        options = {"max_tokens": 8, "messages": [{"role": "user", "content": CANARY}]} | options
        return await client.chat.completions.create(model=MODEL, **options)


def attributes(span) -> dict:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


async def test_one_trace_from_http_to_settle(traced, collector):
    async with traced(trace_ratio=1.0) as gateway:
        answer = await ask(gateway)
        key = gateway.keys.api_key
    spans = {span.name: span for span in collector.spans}
    assert set(spans) >= SPANS
    root = spans["POST /v1/chat/completions"]
    trace = [span for span in collector.spans if span.trace_id == root.trace_id]
    assert {span.name for span in trace} == SPANS
    ids = {span.span_id for span in trace}
    assert all(span.parent_span_id in ids for span in trace if span is not root)
    by_id = {span.span_id: span for span in trace}
    for span in trace:
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        if above := by_id.get(span.parent_span_id):
            assert above.start_time_unix_nano <= span.start_time_unix_nano
            assert span.end_time_unix_nano <= above.end_time_unix_nano
    chat = attributes(spans[f"chat {MODEL}"])
    assert chat["gen_ai.usage.output_tokens"] == answer.usage.completion_tokens
    assert chat["gen_ai.usage.input_tokens"] == answer.usage.prompt_tokens
    text = str(collector.spans)
    assert CANARY not in text
    assert key not in text
    assert answer.choices[0].message.content not in text


async def test_the_ledger_knows_the_trace(traced, collector):
    async with traced(trace_ratio=1.0) as gateway:
        await ask(gateway)
        await gateway.settled()
        (row,) = await gateway.sql("SELECT trace_id FROM ledger_entry WHERE kind = 'settle'")
    (root,) = [span for span in collector.spans if span.name.startswith("POST")]
    assert row.trace_id == root.trace_id.hex()


async def test_a_client_cannot_force_sampling_nor_choose_the_trace(traced, collector):
    async with traced(trace_ratio=0.0) as gateway:
        for _ in range(3):
            await ask(gateway, extra_headers={"traceparent": CLIENT})
        await asyncio.sleep(0.3)
        assert not collector.spans
    # Quiet as it was, its three requests were the slowest of their minute.
    roots = [span for span in collector.spans if span.name.startswith("POST")]
    assert len(roots) == 3
    for root in roots:
        assert root.trace_id.hex() != CLIENT.split("-")[1]
        assert [link.trace_id.hex() for link in root.links] == [CLIENT.split("-")[1]]


async def test_a_listed_caller_is_continued(traced, collector):
    async with traced(trace_ratio=0.0, trace_parent_from="127.0.0.0/8") as gateway:
        await ask(gateway, extra_headers={"traceparent": CLIENT})
    (root,) = [span for span in collector.spans if span.name.startswith("POST")]
    parent = parse(CLIENT)
    assert root.trace_id == parent.trace_id.to_bytes(16)
    assert root.parent_span_id == parent.span_id.to_bytes(8)


async def test_a_failure_of_ours_is_an_error_span(traced, collector, worker):
    async with traced(trace_ratio=0.0) as gateway:
        await gateway.workers(1)
        worker.runner.fail_next = RuntimeError("canary in an exception")
        with pytest.raises(openai.APIStatusError):
            await ask(gateway)
        at_once = lambda spans: any(s.name.startswith("POST") for s in spans)  # noqa: E731
        await asyncio.to_thread(collector.wait_for, at_once, 8)
    root = next(span for span in collector.spans if span.name.startswith("POST"))
    assert root.status.code == 2
    assert "canary" not in str(collector.spans)


async def test_a_collector_that_is_away_costs_no_request(worker, tmp_path, redis_url, free_port, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port}")
    monkeypatch.setattr("gateway.telemetry.tracing.SHUTDOWN_S", 0.3)
    async with running_gateway(tmp_path / "home", redis_url, trace_ratio=1.0) as gateway:
        for _ in range(3):
            assert (await ask(gateway)).usage.completion_tokens == 8
