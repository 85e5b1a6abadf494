"""However a request ends, the worker's sequence is gone, the books balance, and the client was told the truth."""

from __future__ import annotations

import asyncio
import ctypes
import json
import re
import socket
import struct
import time
from pathlib import Path
from typing import Any, Literal

import aiohttp
import anthropic
import pytest
from fakes import Fault, ScriptedRunner, ScriptedWorker
from gateways import MODEL, RunningGateway, running_gateway, until

from accounting.tenants import tenants
from accounting.values.types import Limits, Posting, Usage
from gateway.base.app_keys import DATABASE, LIFECYCLE
from gateway.generation.stream import GENERATION
from gateway.journal.journal import Done, JournalPoisoned
from gateway.metering.metering import METERING
from gateway.telemetry.keys import OBSERVERS
from gateway.telemetry.record import RequestRecord

SO_ATTACH_FILTER = 26
"""Of Linux; Python does not name it."""
MESSAGES: list[Any] = [{"role": "user", "content": "hello there"}]


def body(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": MESSAGES, "max_tokens": 400} | more


def slow(tmp_path: Path, redis_url: str, slot: int = 0, **options: Any) -> ScriptedWorker:
    """100 steps a second, so that there is time to leave."""
    return ScriptedWorker(
        tmp_path / f"w{slot}.sock",
        redis_url=redis_url,
        slot=slot,
        tokens_per_s=100,
        journal_dir=tmp_path / f"w{slot}",
        **options,
    )


async def outcomes(gateway: RunningGateway) -> list[tuple[str, str, int]]:
    """(kind, outcome, output) of every ending, once all are in SQL."""
    await gateway.settled()
    rows = await gateway.sql(
        "SELECT kind, outcome, output FROM ledger_entry WHERE kind IN ('settle', 'void') ORDER BY opened_at_ms"
    )
    return [(row.kind, row.outcome, row.output) for row in rows]


@pytest.mark.parametrize("phase", ["queued", "first tokens", "body"])
async def test_a_client_that_leaves_stops_the_engine_and_pays_for_what_was_made(
    tmp_path: Path, redis_url: str, bare_gateway: RunningGateway, phase: str
) -> None:
    async with slow(tmp_path, redis_url) as worker:
        await bare_gateway.workers(1)
        async with bare_gateway.session() as session:
            if phase == "queued":
                worker.runner.hang()
            asked = asyncio.create_task(_ask(session, stream=phase != "body"))
            await until(lambda: len(worker.engine.attempts) == 1)
            if phase != "queued":
                await until(lambda: worker.num_tokens_sent >= 5)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
        worker.runner.release()
        await until(lambda: not worker.engine.attempts, 1.0)
        [(kind, outcome, output)] = await outcomes(bare_gateway)
        assert outcome == "client_gone"
        if phase == "queued":
            assert output <= 1
        else:
            assert kind == "settle"
            assert 5 <= output <= worker.num_tokens_sent < 400
        await bare_gateway.balanced()
        assert bare_gateway.app[METERING].limiter.num_held == 0


async def _ask(session: aiohttp.ClientSession, stream: bool) -> bytes:
    async with session.post("/v1/chat/completions", json=body(stream=stream)) as answer:
        return await answer.read()


async def test_an_ending_that_cannot_be_written_keeps_no_other_prompt_from_its_own(
    tmp_path: Path, redis_url: str, bare_gateway: RunningGateway, monkeypatch
) -> None:
    admission = bare_gateway.app[METERING].admission
    record, num_asked = admission.endings.record, 0

    def take_none(posting: Posting, done: Done) -> None:
        raise JournalPoisoned

    async def fail_first(posting: Posting) -> None:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 1:
            raise OSError
        await record(posting)

    monkeypatch.setattr("gateway.metering.endings.LATE_EVERY_S", 0.1)
    monkeypatch.setattr(admission.journal, "begin_end", take_none)
    monkeypatch.setattr(admission.endings, "record", fail_first)
    async with slow(tmp_path, redis_url) as worker:
        await bare_gateway.workers(1)
        async with bare_gateway.session() as session:
            ask = {"model": MODEL, "prompt": ["a", "b", "c"], "max_tokens": 400}
            asked = asyncio.create_task(session.post("/v1/completions", json=ask))
            await until(lambda: worker.num_tokens_sent >= 5)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
        await until(lambda: num_asked > 0)
        await until(lambda: bare_gateway.app[METERING].limiter.num_held == 0)
        assert num_asked == 3


async def test_a_client_that_leaves_after_the_last_event_has_ended_well(gateway: RunningGateway) -> None:
    async with (
        gateway.session() as session,
        session.post("/v1/chat/completions", json=body(stream=True, max_tokens=4)) as answer,
    ):
        async for line in answer.content:
            if b"[DONE]" in line:
                break
        answer.close()
    assert await outcomes(gateway) == [("settle", "ok", 4)]


@pytest.mark.parametrize("kind", ["crash", "garble", "silence"])
async def test_a_lost_worker_ends_a_stream_with_an_error_event(
    tmp_path: Path, redis_url: str, bare_gateway: RunningGateway, kind: Literal["crash", "garble", "silence"]
) -> None:
    bare_gateway.loses_at_once()
    async with slow(tmp_path, redis_url, fault=Fault(kind, after_tokens=10)):
        await bare_gateway.workers(1)
        async with (
            bare_gateway.session() as session,
            session.post("/v1/chat/completions", json=body(stream=True)) as answer,
        ):
            assert answer.status == 200
            raw = (await answer.read()).decode()
    events = [event.removeprefix("data: ") for event in raw.split("\n\n") if event]
    assert "[DONE]" not in events
    error = json.loads(events[-1])["error"]
    assert error["code"] == "upstream_lost"
    assert error["retryable"] is True
    assert error["request_id"].startswith("req_")
    assert all(json.loads(event)["choices"][0]["finish_reason"] is None for event in events[:-1])
    assert await outcomes(bare_gateway) == [("void", "worker_lost", 0)]


async def test_a_worker_lost_before_the_first_token_is_a_503(
    tmp_path: Path, redis_url: str, bare_gateway: RunningGateway
) -> None:
    bare_gateway.loses_at_once()
    async with slow(tmp_path, redis_url) as worker:
        await bare_gateway.workers(1)
        worker.runner.hang()
        async with bare_gateway.session() as session:
            asked = asyncio.create_task(_status(session))
            await until(lambda: bool(worker.engine.attempts))
            worker.crash()
            assert await asked == (503, "upstream_lost")
    assert await outcomes(bare_gateway) == [("void", "worker_lost", 0)]


async def _status(session: aiohttp.ClientSession, **more: Any) -> tuple[int, str | None]:
    async with session.post("/v1/chat/completions", json=body(**more)) as answer:
        reply = await answer.json()
        return answer.status, reply.get("error", {}).get("code")


async def test_without_a_worker_the_answer_is_503_and_nothing_is_taken(bare_gateway: RunningGateway) -> None:
    async with bare_gateway.session() as session:
        assert await _status(session) == (503, "no_worker")
    assert await outcomes(bare_gateway) == []


async def test_an_engine_that_shows_no_step_is_named(
    tmp_path: Path, redis_url: str, bare_gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare_gateway.loses_at_once()
    monkeypatch.setattr("gateway.routing.links.worker_link.SUSPECT_STEP_AGE_MS", 500)
    async with slow(tmp_path, redis_url) as worker, bare_gateway.session() as session:
        await bare_gateway.workers(1)
        [link] = bare_gateway.app[GENERATION].fleet.links
        worker.runner.hang()
        hanging = asyncio.create_task(_status(session))
        await until(lambda: not link.takes_work)
        async with session.post("/v1/chat/completions", json=body()) as answer:
            error = (await answer.json())["error"]
        assert (answer.status, error["code"]) == (503, "no_worker")
        assert re.fullmatch(r"The worker of this model has shown no step for \d+ seconds\.", error["message"])
        worker.crash()
        assert await hanging == (503, "upstream_lost")


async def test_two_workers_both_get_work_and_one_lost_leaves_the_other(
    tmp_path: Path, redis_url: str, bare_gateway: RunningGateway
) -> None:
    async with slow(tmp_path, redis_url, 0) as first, slow(tmp_path, redis_url, 1) as second:
        await bare_gateway.workers(2)
        async with bare_gateway.session() as session:
            # Long enough that all eight run at once, however slowly the machine admits them.
            asked = [asyncio.create_task(_status(session, max_tokens=300)) for _ in range(8)]
            await until(lambda: len(first.engine.attempts) + len(second.engine.attempts) == 8)
            assert len(first.engine.attempts) == len(second.engine.attempts) == 4
            second.runner.step_s = 0.0
            first.crash()
            ended = await asyncio.gather(*asked)
            assert ended == [(200, None)] * 8  # the other one goes on with those of the lost one
            assert await _status(session, max_tokens=3) == (200, None)


async def test_a_step_that_raises_is_an_internal_error_and_free(
    tmp_path: Path, redis_url: str, bare_gateway: RunningGateway
) -> None:
    runner = ScriptedRunner()
    async with slow(tmp_path, redis_url, runner=runner):
        await bare_gateway.workers(1)
        runner.fail_next = RuntimeError("a fault of the model")
        async with bare_gateway.session() as session:
            status, code = await _status(session, max_tokens=5)
            assert (status, code) in {(500, "internal_error"), (200, None)}
            assert await _status(session, max_tokens=5) == (200, None)
    assert all(kind == "settle" or output == 0 for kind, _, output in await outcomes(bare_gateway))


async def test_a_drain_cuts_what_does_not_end_and_says_so(
    tmp_path: Path, redis_url: str, bare_gateway: RunningGateway
) -> None:
    lifecycle = bare_gateway.app[LIFECYCLE]
    async with slow(tmp_path, redis_url) as worker:
        await bare_gateway.workers(1)
        async with bare_gateway.session() as session:
            asked = asyncio.create_task(_ask(session, stream=True))
            await until(lambda: worker.num_tokens_sent >= 3)
            lifecycle.draining.set()
            async with session.get("/readyz") as ready:
                assert ready.status == 503
            lifecycle.accepting = False
            assert await _status(session) == (503, "server_draining")
            lifecycle.cut()
            events = (await asked).decode().split("\n\n")
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "server_draining"
        assert await lifecycle.idle(5)
        assert await outcomes(bare_gateway) == [("void", "drain", 0)]
        await until(lambda: not worker.engine.attempts)


async def test_an_idle_stream_is_pinged(
    tmp_path: Path, redis_url: str, bare_gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.generation.stream.PING_S", 0.2)
    async with slow(tmp_path, redis_url) as worker:
        await bare_gateway.workers(1)
        async with (
            bare_gateway.session() as session,
            session.post("/v1/chat/completions", json=body(stream=True, max_tokens=30)) as answer,
        ):
            worker.runner.hang()
            seen = b""
            while b": ping" not in seen:
                seen += await answer.content.readany()
            worker.runner.release()
            seen += await answer.content.read()
        assert seen.endswith(b"data: [DONE]\n\n")


async def test_a_stream_of_messages_is_pinged_by_events_while_it_waits(
    tmp_path: Path, redis_url: str, bare_gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anthropic's clients read over them, also in front of the first event of the message."""
    monkeypatch.setattr("gateway.generation.stream.PING_S", 0.2)
    wanted: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 3,
        "messages": [{"role": "user", "content": "hello"}],
        "extra_headers": {"idempotency-key": "pinged"},
    }
    async with (
        slow(tmp_path, redis_url) as worker,
        anthropic.AsyncAnthropic(
            base_url=bare_gateway.url, api_key=bare_gateway.keys.api_key, max_retries=0
        ) as anthropic_client,
    ):
        await bare_gateway.workers(1)
        worker.runner.hang()
        async with anthropic_client.messages.stream(**wanted) as stream:
            lines = stream.response.aiter_lines()
            assert [await anext(lines) for _ in range(3)] == ["event: ping", 'data: {"type":"ping"}', ""]
            worker.runner.release()
            rest = [line async for line in lines]
        assert next(line for line in rest if line.startswith("event: message")) == "event: message_start"
        worker.runner.hang()
        changed = wanted | {"max_tokens": 4, "extra_headers": {}}
        async with anthropic_client.messages.stream(**changed) as stream:
            asyncio.get_running_loop().call_later(0.7, worker.runner.release)
            message = await stream.get_final_message()
        assert message.usage.output_tokens == 4
        async with anthropic_client.messages.stream(**wanted) as stream:
            assert stream.response.headers["idempotent-replayed"] == "true"
            replayed = await stream.get_final_message()
        assert replayed.usage.output_tokens == 3


async def test_b1_a_stream_that_waits_in_the_queue_is_opened_and_pinged(
    tmp_path: Path, redis_url: str, bare_gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy in front gives up on an answer of which nothing has come for a minute. A ping is no first token."""
    monkeypatch.setattr("gateway.generation.stream.PING_S", 0.2)
    records: list[RequestRecord] = []
    bare_gateway.app[OBSERVERS].of_each(records.append)
    async with slow(tmp_path, redis_url) as worker:
        await bare_gateway.workers(1)
        worker.runner.hang()
        async with (
            bare_gateway.session() as session,
            session.post("/v1/chat/completions", json=body(stream=True, max_tokens=3)) as answer,
        ):
            assert answer.status == 200
            assert await answer.content.readline() == b": ping\n"
            released_ns = time.monotonic_ns()
            worker.runner.release()
            seen = await answer.content.read()
        events = [line for line in seen.split(b"\n") if line.startswith(b"data: ")]
        assert json.loads(events[0][6:])["choices"][0]["delta"]["role"] == "assistant"
        assert events[-1] == b"data: [DONE]"
        await until(lambda: bool(records))
        (record,) = records
        first_ns = next(ns for name, ns in record.marks if name == "first_byte")
        assert record.started_mono_ns + first_ns > released_ns


async def test_b1_a_stream_that_failed_while_it_waited_ends_with_an_error_event(
    tmp_path: Path, redis_url: str, bare_gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.generation.stream.PING_S", 0.2)
    async with slow(tmp_path, redis_url) as worker:
        await bare_gateway.workers(1)
        worker.runner.hang()
        async with (
            bare_gateway.session() as session,
            session.post("/v1/chat/completions", json=body(stream=True, max_tokens=3)) as answer,
        ):
            assert await answer.content.readline() == b": ping\n"
            bare_gateway.app[LIFECYCLE].cut()
            seen = await answer.content.read()
            worker.runner.release()
        events = [line for line in seen.split(b"\n") if line.startswith(b"data: ")]
        assert [json.loads(event[6:])["error"]["code"] for event in events] == ["server_draining"]
    await until(lambda: not worker.engine.attempts)


async def test_a_reader_that_stalls_parks_its_sequence_and_is_dropped(tmp_path: Path, redis_url: str) -> None:
    """A zero window: the queue stays bounded and the sequence is given back after the write timeout."""
    async with (
        running_gateway(tmp_path / "home", redis_url, write_timeout_s=0.4) as gateway,
        ScriptedWorker(tmp_path / "w0.sock", redis_url=redis_url, journal_dir=tmp_path / "w0") as worker,
    ):
        await gateway.workers(1)
        reader, writer = await gateway.socket()
        reader._transport.pause_reading()
        wanted = body(stream=True, max_tokens=1900, n=8, logprobs=True, top_logprobs=20)
        data = json.dumps(wanted).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {gateway.keys.api_key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        writer.write(head.encode() + data)
        await until(lambda: bool(worker.engine.attempts))
        await until(lambda: not worker.engine.attempts, 20)
        assert worker.num_tokens_sent < 1900 * 8
        [(kind, outcome, _)] = await outcomes(gateway)
        assert (kind, outcome) == ("settle", "client_gone")
        writer.close()


async def test_a_clients_host_that_vanishes_stops_the_engine(tmp_path: Path, redis_url: str) -> None:
    """Its connection stays open and acknowledges nothing. The stream would fit into what the system keeps for it."""
    async with (
        running_gateway(tmp_path / "home", redis_url, write_timeout_s=0.2) as gateway,
        slow(tmp_path, redis_url) as worker,
    ):
        await gateway.workers(1)
        data = json.dumps(body(stream=True, max_tokens=1900)).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {gateway.keys.api_key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        _, writer = await gateway.socket()
        writer.write(head.encode() + data)
        await until(lambda: worker.num_tokens_sent >= 5)
        hears_nothing(writer.get_extra_info("socket"))
        await until(lambda: not worker.engine.attempts, 10)
        assert worker.num_tokens_sent < 1900
        [(kind, outcome, _)] = await outcomes(gateway)
        assert (kind, outcome) == ("settle", "client_gone")
        writer.close()


def hears_nothing(connection: socket.socket) -> None:
    """The system drops every packet to this socket before it is acknowledged: a filter of one instruction, `return 0`."""
    instruction = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
    program = struct.pack("HP", 1, ctypes.addressof(instruction))
    connection.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


async def test_what_two_prompts_took_is_given_back_when_the_second_is_refused(
    gateway: RunningGateway, worker: ScriptedWorker
) -> None:
    """Concurrency 1: the first prompt is admitted, the second is not, and nothing stays taken."""
    tenant, key = await gateway.new_tenant("narrow")
    async with gateway.app[DATABASE].write() as conn:
        await tenants.set_limits(conn, tenant, Limits(concurrency=1), now=1)
    async with gateway.session(key) as session:
        async with session.post(
            "/v1/completions", json={"model": MODEL, "prompt": ["a", "b"], "max_tokens": 2}
        ) as answer:
            assert answer.status == 429
            assert int(answer.headers["retry-after"]) >= 1
        await gateway.settled()
        async with session.post("/v1/completions", json={"model": MODEL, "prompt": "a", "max_tokens": 2}) as answer:
            assert answer.status == 200
    assert gateway.app[GENERATION].fleet.links[0].num_calls == 0


@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_b5_the_access_log_of_a_left_stream_says_what_was_charged(
    tmp_path: Path, redis_url: str, bare_gateway: RunningGateway, phase: str
) -> None:
    ended: list[RequestRecord] = []
    bare_gateway.app[OBSERVERS].of_each(ended.append)
    async with slow(tmp_path, redis_url) as worker:
        await bare_gateway.workers(1)
        async with bare_gateway.session() as session:
            asked = asyncio.create_task(_ask(session, stream=phase == "decode"))
            await until(lambda: worker.num_tokens_sent >= 5)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
        await until(lambda: bool(ended))
        await bare_gateway.settled()
    [row] = await bare_gateway.sql(
        "SELECT cache_read, cache_write, uncached, output, charge FROM ledger_entry WHERE kind = 'settle'"
    )
    [record] = ended
    assert record.charge_micro_units == row.charge > 0
    assert record.usage == Usage(row.cache_read, row.cache_write, row.uncached, row.output)


async def test_b5_nobody_is_told_to_wait_longer_than_a_minute_for_a_limit_per_minute(
    tmp_path: Path, redis_url: str, bare_gateway: RunningGateway
) -> None:
    """The window counts by whole seconds, so a minute may take 61 of them; SDKs heed no more than 60."""
    tenant, key = await bare_gateway.new_tenant("limited")
    async with bare_gateway.app[DATABASE].write() as conn:
        await tenants.set_limits(conn, tenant, Limits(requests_per_minute=1), now=1)
    async with slow(tmp_path, redis_url), bare_gateway.session(key) as session:
        await bare_gateway.workers(1)
        small = body(max_tokens=1)
        async with session.post("/v1/chat/completions", json=small) as answer:
            assert answer.status == 200
        told = []
        for _ in range(4):
            async with session.post("/v1/chat/completions", json=small) as answer:
                assert answer.status == 429
                told.append((answer.headers["retry-after"], answer.headers["retry-after-ms"]))
            await asyncio.sleep(0.3)
    assert all(50 < int(seconds) <= 60 for seconds, _ in told), told
    assert all(50_000 < int(milliseconds) <= 60_000 for _, milliseconds in told), told
