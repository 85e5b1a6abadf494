"""Requests through the real gateway and scripted workers, to a real OTLP receiver: which traces leave, and what they tell of
a failure, of a worker's death, and of a repeat."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
from fakes import Fault, ScriptedWorker
from gateways import MODEL, RunningGateway, running_gateway, until
from otlp import attributes, events, links

from accounting.values import timelines
from gateway.telemetry.span_export import parse

pytestmark = pytest.mark.rest

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CANARY = "canary in the prompt"


@pytest.fixture
async def worker(tmp_path: Path, redis_url: str) -> AsyncIterator[ScriptedWorker]:
    async with ScriptedWorker(tmp_path / "w0.sock", redis_url=redis_url) as worker:
        yield worker


@pytest.fixture
async def traced(tmp_path, redis_url, collector, monkeypatch):
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


async def test_a_client_cannot_force_sampling_nor_choose_the_trace(traced, worker, collector):
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


async def test_a_listed_caller_is_continued(traced, worker, collector):
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


def root_of(spans: list):
    """The only SERVER span of a generation."""
    (root,) = [span for span in spans if span.name == "POST /v1/chat/completions"]
    return root


def below(spans: list, root, name: str):
    (span,) = [span for span in spans if span.trace_id == root.trace_id and span.name == name]
    return span


async def test_a_stream_whose_worker_dies_leaves_its_trace_at_ratio_0(traced, collector, tmp_path, redis_url):
    """Before the death of the worker nothing says that the request will be sampled, and afterwards only the gateway can
    tell of it."""
    dying = ScriptedWorker(
        tmp_path / "dying.sock", redis_url=redis_url, tokens_per_s=200, fault=Fault("crash", after_tokens=3)
    )
    async with dying, traced(trace_ratio=0.0, resume_s=0.0) as gateway, gateway.client() as client:
        await gateway.workers(1)
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": CANARY}], max_tokens=200, stream=True
        )
        with pytest.raises(openai.APIError):
            _ = [chunk async for chunk in stream]
        spans = await asyncio.to_thread(collector.wait_for, lambda spans: any(s.name == "ship" for s in spans), 30)
        root = root_of(spans)
        log: list = []
        async with asyncio.timeout(60):
            while not log:
                log = await gateway.sql("SELECT trace_id FROM request_log")
    chat = below(spans, root, f"chat {MODEL}")
    assert attributes(root)["http.response.status_code"] == 200, "its head had left"
    assert attributes(root)["error.type"] == attributes(chat)["error.type"] == "upstream_lost"
    assert (root.status.code, chat.status.code) == (2, 2)
    (lost,) = events(chat, "worker_lost")
    assert lost["headgate.num_tokens"] == attributes(chat)["gen_ai.usage.output_tokens"] > 0
    assert attributes(chat)["headgate.worker.id"] == "worker-0"
    assert attributes(below(spans, root, "settle"))["headgate.charge.micro_units"] == 0, "it is free of charge"
    assert [row.trace_id for row in log] == [root.trace_id.hex()]


async def test_a_stream_that_another_worker_goes_on_with_is_one_trace(traced, collector, tmp_path, redis_url):
    dying = ScriptedWorker(
        tmp_path / "dying.sock", redis_url=redis_url, tokens_per_s=200, fault=Fault("crash", after_tokens=3)
    )
    async with traced(trace_ratio=1.0) as gateway, dying, gateway.client() as client:
        await gateway.workers(1)
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": CANARY}], max_tokens=20, stream=True
        )
        await until(lambda: dying.num_tokens_sent >= 3, 30)
        async with ScriptedWorker(tmp_path / "w1.sock", redis_url=redis_url, slot=1):
            _ = [chunk async for chunk in stream]
            spans = await asyncio.to_thread(collector.wait_for, lambda spans: any(s.name == "ship" for s in spans), 30)
        details: list = []
        async with asyncio.timeout(60):
            while not details:
                details = await gateway.sql("SELECT timeline FROM request_log")
    root = root_of(spans)
    chat = below(spans, root, f"chat {MODEL}")
    assert len(events(chat, "moved")) == 1
    assert not events(chat, "worker_lost")
    assert attributes(chat)["headgate.worker.id"] == "worker-1"
    assert attributes(chat)["gen_ai.usage.output_tokens"] == 20
    (moved_ns,) = [event.time_unix_nano for event in chat.events if event.name == "moved"]
    prefill = next(s for s in spans if s.name == "prefill" and s.parent_span_id == chat.span_id)
    assert chat.start_time_unix_nano < moved_ns <= prefill.start_time_unix_nano < chat.end_time_unix_nano
    phases = {phase.name: phase for phase in timelines.phases(timelines.unpack(details[0].timeline))}
    assert phases["lost"].end_us <= phases["prefill"].start_us


async def test_a_repeat_behind_a_dead_worker_is_joined_by_the_clients_trace(traced, collector, tmp_path, redis_url):
    dying = ScriptedWorker(
        tmp_path / "dying.sock", redis_url=redis_url, tokens_per_s=200, fault=Fault("crash", after_tokens=3)
    )
    async with traced(trace_ratio=0.0, resume_s=0.0) as gateway, dying, gateway.client(max_retries=1) as client:
        await gateway.workers(1)
        asking = asyncio.create_task(
            client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": CANARY}],
                max_tokens=8,
                extra_headers={"traceparent": CLIENT},
            )
        )
        await until(lambda: dying.num_tokens_sent >= 3, 30)
        async with ScriptedWorker(tmp_path / "w1.sock", redis_url=redis_url, slot=1):
            assert (await asking).usage.completion_tokens == 8
    roots = sorted((s for s in collector.spans if s.name.startswith("POST")), key=lambda s: s.start_time_unix_nano)
    assert attributes(roots[0])["error.type"] == "upstream_lost"
    assert [attributes(s).get("headgate.num_retries", 0) for s in roots] == list(range(len(roots)))
    assert roots[-1].status.code == 0
    assert len({root.trace_id for root in roots}) == len(roots) == 2
    assert all(links(root) == [tuple(CLIENT.split("-")[1:3])] for root in roots)
    workers = [attributes(below(collector.spans, root, f"chat {MODEL}"))["headgate.worker.id"] for root in roots]
    assert workers == ["worker-0", "worker-1"]


async def test_a_collector_that_is_away_costs_no_request(worker, tmp_path, redis_url, free_port, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setattr("gateway.telemetry.tracing.SHUTDOWN_S", 0.3)
    async with running_gateway(tmp_path / "home", redis_url, trace_ratio=1.0) as gateway:
        for _ in range(3):
            assert (await ask(gateway)).usage.completion_tokens == 8
