"""Attacks by how many, how often and in which way, each on a gateway of its own (security.md section 8)."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import socket
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from fakes import ScriptedRunner, ScriptedWorker
from gateways import MODEL, PEPPER, RunningGateway, running_gateway, until
from load import stretched

from accounting.access import api_keys
from accounting.limits import quotas
from accounting.tenants import tenants
from accounting.values.types import Limits, Quota
from gateway.base.app_keys import DATABASE
from gateway.http.http_limits import MAX_QUEUE_BYTES
from gateway.intake.intake import INTAKE
from gateway.metering.metering import METERING

CHAT = "/v1/chat/completions"


def chat(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 30} | more


async def test_attack_D04_leaving_just_before_the_usage_saves_nothing(gateway: RunningGateway) -> None:
    wanted = chat(stream=True, stream_options={"include_usage": True}, seed=7)
    async with gateway.session() as session:
        async with session.post(CHAT, json=wanted) as answer:
            told = [line async for line in answer.content if b'"usage":{' in line]
        async with session.post(CHAT, json=wanted) as answer:
            async for line in answer.content:
                if b'"finish_reason":"' in line:
                    break
            answer.close()
    await gateway.balanced()
    rows = await gateway.sql(
        "SELECT cache_read + cache_write + uncached, output FROM ledger_entry WHERE kind = 'settle'"
    )
    usage = json.loads(told[-1].removeprefix(b"data: "))["usage"]
    assert [tuple(row) for row in rows] == [(usage["prompt_tokens"], usage["completion_tokens"])] * 2


@pytest.mark.parametrize("more", [{}, {"n": 3}, {"tools": [{"type": "function", "function": {"name": "f"}}]}])
async def test_attack_D05_no_way_to_take_an_answer_is_cheaper(gateway: RunningGateway, more: dict[str, Any]) -> None:
    ways = [{}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}]
    async with gateway.session() as session:
        for way in ways:
            async with session.post(CHAT, json=chat(seed=7, **more, **way)) as answer:
                assert answer.status == 200
                await answer.read()
    await gateway.balanced()
    rows = await gateway.sql(
        "SELECT cache_read + cache_write + uncached, output FROM ledger_entry WHERE kind = 'settle'"
    )
    assert len(rows) == len(ways)
    assert len({tuple(row) for row in rows}) == 1
    assert rows[0].output > 0


async def test_attack_D06_a_hundred_keys_of_one_tenant_have_its_limit_together(gateway: RunningGateway) -> None:
    most, now = 5, int(time.time())
    tenant, _ = await gateway.new_tenant("many keys")
    async with gateway.app[DATABASE].write() as conn:
        await tenants.set_limits(conn, tenant, Limits(requests_per_minute=most), now=now)
        made = [await api_keys.create(conn, PEPPER, tenant_id=tenant, now=now) for _ in range(100)]

    async def ask(key: str) -> int:
        async with gateway.session(key) as session, session.post(CHAT, json=chat(max_tokens=1)) as answer:
            return answer.status

    statuses = await asyncio.gather(*(ask(one.value) for one in made))
    assert 1 <= statuses.count(200) <= most
    assert set(statuses) == {200, 429}


HOSTILE = ("' OR 1=1 --", "%", "*", "_", "-1", "1e9", "0x10", "99999999999999999999", "desc;drop table file", "\0", "é")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches", "/v1/requests", "/v1/models", "/v1/messages/batches"])
@pytest.mark.parametrize("name", ["limit", "order", "after", "after_id"])
async def test_attack_E03_what_lists_are_asked_with_is_taken_or_refused(
    shared_gateway: RunningGateway, path: str, name: str
) -> None:
    _, stranger = await shared_gateway.new_tenant("stranger")
    async with shared_gateway.session(stranger) as session:
        async with session.get(path) as answer:
            plain = (await answer.json())["data"]
        for value in HOSTILE:
            async with session.get(path, params={name: value}) as answer:
                assert answer.status in (200, 400, 404), (value, await answer.text())
                if answer.status == 200:  # the parameter or its value means nothing here
                    assert (await answer.json())["data"] == plain


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "/etc/passwd",
        "http://127.0.0.1/x",
        "org/repository",
        "file:///dev/zero",
        MODEL + "/..",
        "\0",
        "*",
    ],
)
async def test_attack_E08_a_model_that_looks_like_a_place_is_no_model(
    shared_gateway: RunningGateway, name: str
) -> None:
    bodies = {
        CHAT: chat(model=name),
        "/v1/completions": {"model": name, "prompt": "x"},
        "/v1/embeddings": {"model": name, "input": "x"},
        "/v1/responses": {"model": name, "input": "x"},
        "/tokenize": {"model": name, "prompt": "x"},
    }
    async with shared_gateway.session() as session:
        for path, body in bodies.items():
            async with session.post(path, json=body) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (404, "model_not_found"), path


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_attack_E01_no_text_of_a_client_enters_redis(gateway: RunningGateway, redis_url: str, path: str) -> None:
    """Braces, line ends and patterns in everything that a client names, while limits count by it."""
    hostile = "mark}:s\r\nFLUSHALL\r\n{t:*?[a]"
    tenant_id, key = await gateway.new_tenant(hostile.replace("\r\n", " "))
    async with gateway.app[DATABASE].write() as conn:
        for quota in (Quota("model", MODEL, "requests_per_day", 100), Quota("end_user", "", "requests_per_day", 100)):
            await quotas.put(conn, tenant_id, quota, now=1)
    wanted = chat(user=hostile, metadata={"mark": hostile}, cache_salt=hostile, safety_identifier=hostile)
    if path != CHAT:
        wanted["prompt"] = wanted.pop("messages")[0]["content"]
    headers = {"Idempotency-Key": "mark}{t:*", "x-client-request-id": "mark}{t:*"}
    async with gateway.session(key) as session, session.post(path, json=wanted, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
    async with redis.asyncio.from_url(redis_url) as client:
        names = [name async for name in client.scan_iter()]
        fields = [await client.hgetall(name) for name in names if await client.type(name) == b"hash"]
    space = f"hg:{{t:{tenant_id}}}:".encode()
    assert sum(name.startswith(space) for name in names) > 3
    assert "mark" not in repr((names, fields))


@pytest.mark.rest
async def test_attack_A07_many_streams_that_nobody_reads_are_bounded_and_dropped(
    tmp_path: Path, redis_url: str
) -> None:
    """While they are parked, a stranger is served and no connection keeps more unsent bytes than one write beyond the
    bound."""
    num_streams, most_bytes = 40, 2 * MAX_QUEUE_BYTES
    wanted = json.dumps(chat(stream=True, max_tokens=1900, logprobs=True, top_logprobs=20)).encode()
    async with (
        running_gateway(tmp_path / "home", redis_url, write_timeout_s=3.0, limiter_timeout_s=5.0) as gateway,
        ScriptedWorker(
            tmp_path / "w0.sock",
            redis_url=redis_url,
            journal_dir=tmp_path / "w0",
            runner=ScriptedRunner(num_blocks=num_streams * 130),
        ) as worker,
    ):
        await gateway.workers(1)
        head = (
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {gateway.keys.api_key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(wanted)}\r\n\r\n"
        ).encode()
        deaf = [await _deaf(gateway.port) for _ in range(num_streams)]
        loop, most = asyncio.get_running_loop(), 0
        for one in deaf:
            await loop.sock_sendall(one, head + wanted)
        await until(lambda: len(worker.engine.attempts) > num_streams // 2, 60)
        _, key = await gateway.new_tenant("stranger")
        async with gateway.session(key) as session:
            while worker.engine.attempts:
                async with session.post(CHAT, json=chat(stream=True)) as answer:
                    assert answer.status == 200
                    assert b"[DONE]" in await answer.read()
                most = max(most, *map(_num_unsent, _connections(gateway)))
        assert 0 < most <= most_bytes
        assert worker.num_tokens_sent < num_streams * 1900
        await until(lambda: not gateway.app[METERING].limiter.num_held)
        await gateway.balanced()
        rows = await gateway.sql(
            "SELECT outcome, count(*) AS n FROM ledger_entry WHERE kind = 'settle' GROUP BY outcome"
        )
        assert {row.outcome: row.n for row in rows}["client_gone"] == num_streams
        for one in deaf:
            one.close()


async def test_attack_A07_an_answer_that_is_read_too_slowly_is_dropped_and_counts_until_then(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing bounded the wait for a reader of a few bytes a second, and its key's places were free meanwhile."""
    monkeypatch.setattr("gateway.http.http_limits.UNACKNOWLEDGED", None)  # the system has a bound of its own
    wanted = json.dumps({"model": MODEL, "prompt": "a" * 390_000}).encode()
    async with running_gateway(tmp_path / "home", redis_url, max_model_len=2**20, write_timeout_s=1.0) as gateway:
        head = (
            f"POST /tokenize HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {gateway.keys.api_key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(wanted)}\r\n\r\n"
        ).encode()
        loop, intake = asyncio.get_running_loop(), gateway.app[INTAKE]
        slow = [await _deaf(gateway.port), await _deaf(gateway.port, 32 * 1024)]
        for one in slow:
            await loop.sock_sendall(one, head + wanted)
        await until(lambda: sum(map(_num_unsent, _connections(gateway))) > 4 * MAX_QUEUE_BYTES)
        await asyncio.sleep(0.3)
        assert intake.num_held >= 2 * len(wanted)
        deadline = loop.time() + stretched(6)
        while _connections(gateway) and loop.time() < deadline:
            with contextlib.suppress(OSError):
                await loop.sock_recv(slow[1], 4096)
            await asyncio.sleep(0.1)
        assert not _connections(gateway)
        await until(lambda: not intake.num_held)
        for one in slow:
            one.close()


async def _deaf(port: int, num_bytes: int = 4096) -> socket.socket:
    """A connection that takes a few KiB and reads nothing."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, num_bytes)
    made.setblocking(False)
    await asyncio.get_running_loop().sock_connect(made, ("127.0.0.1", port))
    return made


def _num_unsent(connection: Any) -> int:
    """Bytes that wait in the process and in the system."""
    outer = connection.transport.get_extra_info("socket")
    in_system = fcntl.ioctl(outer.fileno(), termios.TIOCOUTQ, bytes(4))
    return int(connection.transport.get_write_buffer_size()) + int.from_bytes(in_system, sys.byteorder)


def _connections(gateway: RunningGateway) -> list[Any]:
    assert gateway.runner.server is not None
    return [one for one in gateway.runner.server.connections if one.transport is not None]
