"""S3: what one tenant sends before any limit counts it does not keep another waiting."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from gateways import MODEL, RunningGateway, running_gateway, until

from gateway.intake.body_checker import BODY_CHECKER
from gateway.intake.intake import INTAKE
from gateway.intake.json_body import decode_object
from gateway.intake.json_pieces import Cut
from gateway.intake.text_work import TEXT_WORK
from gateway.routes import common
from gateway.telemetry.metrics import METRICS

CHAT = "/v1/chat/completions"
BROKEN = b'{"model": "scripted", "messages": [' + b" " * 2**20
HEADERS = {"content-type": "application/json"}


@pytest.fixture
async def bare_gateway(tmp_path: Path, redis_url: str) -> AsyncIterator[RunningGateway]:
    async with running_gateway(tmp_path / "home", redis_url, body_bytes_per_minute=16 * 2**20) as gateway:
        yield gateway


def chat(**more: Any) -> bytes:
    message = {"role": "user", "content": "hi"}
    return json.dumps({"model": MODEL, "messages": [message], "max_tokens": 1} | more).encode()


async def post(session: aiohttp.ClientSession, body: bytes, path: str = CHAT) -> tuple[int, dict[str, Any]]:
    async with session.post(path, data=io.BytesIO(body), headers=HEADERS) as answer:
        return answer.status, await answer.json()


async def test_s3_a_stranger_is_answered_while_large_bodies_still_wait(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, let_go, begun = gateway.app[BODY_CHECKER].check, threading.Event(), threading.Event()

    def held(body: bytes) -> list[Cut]:
        begun.set()
        assert let_go.wait(60)
        return check(body)

    monkeypatch.setattr(gateway.app[BODY_CHECKER], "check", held)
    _, victim_key = await gateway.new_tenant("victim", scopes=("chat",))
    async with gateway.session() as hostile, gateway.session(victim_key) as victim:
        flood = [asyncio.create_task(post(hostile, BROKEN)) for _ in range(8)]
        work = gateway.app[TEXT_WORK]
        try:
            await until(begun.is_set)
            await until(lambda: gateway.app[INTAKE].num_held == 8 * len(BROKEN))
            async with asyncio.timeout(20):
                status, reply = await post(victim, chat())
            assert status == 200, reply
            assert not any(task.done() for task in flood)
            assert work.num_waiting == 7
        finally:
            let_go.set()
        assert [status for status, _ in await asyncio.gather(*flood)] == [400] * 8
    await until(lambda: gateway.app[INTAKE].num_held == 0)


async def test_s3_bytes_of_a_minute_are_refused_before_they_are_read(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, victim_key = await gateway.new_tenant("victim", scopes=("chat",))
    async with gateway.session() as hostile, gateway.session(victim_key) as victim:
        body = b"{" + b" " * (4 * 2**20 - 1)
        monkeypatch.setattr(gateway.app[INTAKE], "_clock", lambda: 0.0)
        for _ in range(4):
            assert (await post(hostile, body))[0] == 400
        monkeypatch.setattr(common, "decode_object", lambda *_: pytest.fail("it was decoded"))
        async with hostile.post(CHAT, data=io.BytesIO(body), headers=HEADERS) as answer:
            error = (await answer.json())["error"]
            assert answer.status == 429
            assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert error["code"] == "rate_limit_exceeded"
        assert error["headgate"]["dimension"] == "body_bytes_per_minute"
        monkeypatch.setattr(common, "decode_object", decode_object)
        assert (await post(victim, chat()))[0] == 200
    sample = gateway.app[METRICS].registry.get_sample_value
    assert sample("headgate_body_refusals_total", {"dimension": "body_bytes_per_minute"}) == 1
    assert sample("headgate_body_bytes_total") == 4 * len(body) + len(chat())


async def test_s3_a_body_without_a_valid_key_is_not_read(gateway: RunningGateway) -> None:
    reader, writer = await gateway.socket()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer hg_live_wrong\r\n"
        b"content-type: application/json\r\ncontent-length: 4000000\r\n\r\n{"
    )
    async with asyncio.timeout(20):
        assert (await reader.readline()).split()[1] == b"401"
    assert gateway.app[INTAKE].num_taken == 0
    writer.close()


async def test_a_body_beyond_the_operators_bound_is_413_and_says_the_bound(gateway: RunningGateway) -> None:
    async with gateway.session() as session:
        status, reply = await post(session, chat(user="x" * (4 * 2**20)))
    assert (status, reply["error"]["code"]) == (413, "request_too_large")
    assert "4,194,304" in reply["error"]["message"]
