"""What docs/observability.md promises, at a real OTLP/HTTP receiver: every span of a request with its parent, kind,
attributes, events and links, whatever the worker had to do for it."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from fakes import VOCAB_SIZE, ScriptedRunner, ScriptedWorker
from gateways import MODEL, RunningGateway, running_gateway
from inline_grammars import InlineGrammars
from otlp import Collector, attributes, events, kind, links
from redis_db import emptied
from scripted_host import ScriptedHost

pytestmark = [pytest.mark.rest, pytest.mark.asyncio(loop_scope="module")]

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CANARY = "canary in the prompt"
FORM: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["Bern", "Chur"]}}}
BLOCKS, BLOCK_SIZE, CHUNK = 30, 16, 64


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    made = Collector()
    thread = threading.Thread(target=made.server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def traced(
    redis_socket: Path, tmp_path_factory: pytest.TempPathFactory, collector: Collector
) -> AsyncIterator[RunningGateway]:
    """Its worker has room for one long request and a half, computes prompts in chunks, and swaps."""
    directory = tmp_path_factory.mktemp("traced")
    redis_url = emptied(redis_socket, 3)
    vocabulary = [bytes([i]) for i in range(256)] + [b""] * (VOCAB_SIZE - 256)
    runner = ScriptedRunner(num_blocks=BLOCKS, block_size=BLOCK_SIZE)
    worker = ScriptedWorker(
        directory / "w0.sock",
        redis_url=redis_url,
        runner=runner,
        grammars=InlineGrammars(vocabulary),
        host=ScriptedHost(runner, 64),
        preempt="swap",
        max_batch_tokens=CHUNK,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        async with running_gateway(directory / "home", redis_url, trace_ratio=1.0) as gateway, worker:
            await gateway.workers(1)
            yield gateway


async def trace_of(collector: Collector, request_id: str) -> dict[str, list]:
    """The spans of a request's trace by name, once its `ship` is there."""

    def found(spans: list) -> list:
        ids = [s.trace_id for s in spans if attributes(s).get("headgate.request.id") == request_id]
        return [s for s in spans if ids and s.trace_id == ids[0]]

    done: Callable[[list], bool] = lambda spans: "ship" in {s.name for s in found(spans)}  # noqa: E731
    by_name: dict[str, list] = {}
    for span in found(await asyncio.to_thread(collector.wait_for, done, 30)):
        by_name.setdefault(span.name, []).append(span)
    return by_name


async def ask(gateway: RunningGateway, **options: Any) -> str:
    """The id of a request by the official client, which has read the whole answer."""
    options = {"max_tokens": 8, "messages": [{"role": "user", "content": CANARY}]} | options
    async with gateway.client() as client:
        answer = await client.chat.completions.with_raw_response.create(model=MODEL, **options)
        if options.get("stream"):
            async for _ in answer.parse():
                pass
        return answer.headers["x-request-id"]


async def test_one_call_of_the_official_client_is_one_trace(traced: RunningGateway, collector: Collector) -> None:
    request_id = await ask(
        traced,
        messages=[{"role": "user", "content": CANARY + " " + "x" * 150}],
        response_format=FORM,
        temperature=0.5,
        stream=True,
        extra_headers={"traceparent": CLIENT},
    )
    spans = await trace_of(collector, request_id)
    above = {
        "POST /v1/chat/completions": None,
        "admit": "POST /v1/chat/completions",
        "dispatch": "POST /v1/chat/completions",
        f"chat {MODEL}": "POST /v1/chat/completions",
        "grammar": f"chat {MODEL}",
        "queue": f"chat {MODEL}",
        "prefill": f"chat {MODEL}",
        "decode": f"chat {MODEL}",
        "settle": "POST /v1/chat/completions",
        "ship": "POST /v1/chat/completions",
    }
    assert set(spans) == set(above)
    for name, parent in above.items():
        for span in spans[name]:
            assert span.parent_span_id == (spans[parent][0].span_id if parent else b""), name
            assert span.start_time_unix_nano <= span.end_time_unix_nano
            if parent and name != "ship":
                assert spans[parent][0].start_time_unix_nano <= span.start_time_unix_nano
                assert span.end_time_unix_nano <= spans[parent][0].end_time_unix_nano
    root, chat = spans["POST /v1/chat/completions"][0], spans[f"chat {MODEL}"][0]
    assert (kind(root), kind(chat)) == ("SERVER", "CLIENT")
    assert {kind(s) for name in set(above) - {root.name, chat.name} for s in spans[name]} == {"INTERNAL"}
    assert links(root) == [tuple(CLIENT.split("-")[1:3])]
    assert not any(s.links for name in above for s in spans[name] if s is not root)

    assert [e.name for e in root.events] == ["authenticated", "grammar", "tokenized", "first_byte"]
    told = attributes(root)
    assert told["http.route"] == "/v1/chat/completions"
    assert told["http.response.status_code"] == 200
    assert told["headgate.outcome"] == "ok"
    assert attributes(spans["admit"][0])["headgate.lease.bound"] > 0
    (routed,) = events(spans["dispatch"][0], "routed")
    assert routed["headgate.router.reason"] == "only"
    told = attributes(chat)
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.request.model"] == told["gen_ai.response.model"] == MODEL
    assert (told["gen_ai.request.max_tokens"], told["gen_ai.request.temperature"]) == (8, 0.5)
    assert told["gen_ai.request.stream"] is True
    assert told["headgate.has_grammar"] is True
    assert told["gen_ai.usage.output_tokens"] > 0
    assert told["headgate.wire_s"] >= 0
    prefill = spans["prefill"][0]
    (match,) = events(prefill, "cache_match")
    assert match["headgate.cache.miss_reason"] == "cold"
    chunks = events(prefill, "chunk")
    assert len(chunks) >= 3
    assert sum(c["headgate.num_tokens"] for c in chunks) == told["gen_ai.usage.input_tokens"]
    assert "headgate.charge.micro_units" in attributes(spans["settle"][0])

    ledger = await traced.sql("SELECT trace_id FROM ledger_entry WHERE request_id = :id", id=request_id)
    assert {row.trace_id for row in ledger} == {root.trace_id.hex()}
    log: list = []
    async with asyncio.timeout(60):
        while not log:
            log = await traced.sql("SELECT trace_id FROM request_log WHERE request_id = :id", id=request_id)
    assert [row.trace_id for row in log] == [root.trace_id.hex()]


async def test_leases_preemption_and_swaps_stand_where_they_happened(
    traced: RunningGateway, collector: Collector
) -> None:
    """Two requests that each fit alone: one of them loses its blocks to the other, and gets them back from the host."""
    prompts = [[{"role": "user", "content": letter * 60}] for letter in "ab"]
    ids = await asyncio.gather(*(ask(traced, messages=p, max_tokens=280) for p in prompts))
    traces = [await trace_of(collector, request_id) for request_id in ids]
    chats = [trace[f"chat {MODEL}"][0] for trace in traces]
    for chat in chats:
        bounds = [lease["headgate.lease.bound"] for lease in events(chat, "lease")]
        assert bounds == sorted(bounds)
        assert len(bounds) == attributes(chat)["headgate.lease.renewals"] >= 2
    (number,) = [n for n, chat in enumerate(chats) if events(chat, "swapped_out")][:1]
    chat, trace = chats[number], traces[number]
    names = [e.name for e in chat.events if e.name != "lease"]
    first = names.index("preempted")
    assert [n for n in names[first:] if n not in ("parked", "unparked")][:4] == [
        "preempted",
        "swapped_out",
        "resumed",
        "swapped_in",
    ]
    assert attributes(chat)["headgate.preemptions"] >= 1
    assert trace["preempted"]
    assert len(trace["decode"]) >= 2, "a window before, and one after"
    windows = sorted(
        (s.start_time_unix_nano, s.end_time_unix_nano)
        for name in ("decode", "preempted", "parked", "swap_in")
        for s in trace.get(name, [])
    )
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(windows))


async def test_a_second_request_shows_what_the_cache_had(traced: RunningGateway, collector: Collector) -> None:
    prompt = [{"role": "user", "content": "y" * 100}]
    for _ in range(2):
        request_id = await ask(traced, messages=prompt)
    spans = await trace_of(collector, request_id)
    (match,) = events(spans["prefill"][0], "cache_match")
    cached = match["headgate.cache.cached_tokens"]
    assert cached == attributes(spans[f"chat {MODEL}"][0])["gen_ai.usage.cache_read.input_tokens"] >= 96


async def test_a_refusal_names_the_limit(traced: RunningGateway, collector: Collector) -> None:
    session = traced.session()
    async with session, session.post("/v1/chat/completions", json={"model": MODEL, "messages": []}) as answer:
        assert answer.status == 400
        assert "traceresponse" not in answer.headers, "only who sends a traceparent takes part in traces"
        request_id = answer.headers["x-request-id"]

    def done(spans: list) -> bool:
        return any(attributes(s).get("headgate.request.id") == request_id for s in spans)

    found = await asyncio.to_thread(collector.wait_for, done, 30)
    (root,) = [s for s in found if attributes(s).get("headgate.request.id") == request_id]
    assert attributes(root)["headgate.outcome"] == "client_error"
    assert root.status.code == 0, "a client's mistake is no error of ours"


async def test_the_answer_names_its_span_to_who_sent_one(traced: RunningGateway, collector: Collector) -> None:
    async with traced.client() as client:
        answer = await client.chat.completions.with_raw_response.create(
            model=MODEL,
            messages=[{"role": "user", "content": CANARY}],
            max_tokens=2,
            extra_headers={"traceparent": CLIENT},
        )
    _, trace_id, span_id, _ = answer.headers["traceresponse"].split("-")
    spans = await trace_of(collector, answer.headers["x-request-id"])
    (root,) = spans["POST /v1/chat/completions"]
    assert (root.trace_id.hex(), root.span_id.hex()) == (trace_id, span_id)


async def test_a_replayed_answer_names_the_request_that_ran(traced: RunningGateway, collector: Collector) -> None:
    headers = {"idempotency-key": "once", "traceparent": CLIENT}
    first = await ask(traced, extra_headers=headers)
    again = await ask(traced, extra_headers=headers)

    def of(spans: list) -> list:
        return [s for s in spans if attributes(s).get("headgate.request.id") == again]

    spans = await asyncio.to_thread(collector.wait_for, lambda spans: bool(of(spans)), 30)
    (root,) = of(spans)
    assert attributes(root)["headgate.replayed.request.id"] == first != again
    assert [s.name for s in spans if s.trace_id == root.trace_id] == [root.name], "nothing ran, and nothing was charged"


async def test_no_text_and_no_key_stands_in_any_span(traced: RunningGateway, collector: Collector) -> None:
    request_id = await ask(traced, user=CANARY, metadata={"note": CANARY}, stop=["canary stop"])
    await trace_of(collector, request_id)
    text = str(collector.spans)
    assert "canary" not in text
    assert traced.keys.api_key not in text
