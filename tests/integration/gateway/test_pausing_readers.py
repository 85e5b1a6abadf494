"""Clients that stop reading a stream: one that reads on in time gets all of it, and one that does not is dropped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fakes import ScriptedWorker
from gateways import MODEL, RunningGateway, running_gateway, until

NUM_TOKENS = 300
HOLD_EVERY_S = 0.05
CHAT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hi"}],
    "stream": True,
    "max_tokens": NUM_TOKENS,
    "logprobs": True,
    "top_logprobs": 20,
}
RESPONSE = {
    "model": MODEL,
    "input": "hi",
    "max_output_tokens": NUM_TOKENS,
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 20,
}


def post(key: str, path: str, body: dict[str, Any], *headers: str) -> bytes:
    data = json.dumps(body).encode()
    lines = (f"POST {path} HTTP/1.1", *_heads(key), f"content-length: {len(data)}", "connection: close", *headers)
    return "\r\n".join((*lines, "", "")).encode() + data


def get(key: str, path: str) -> bytes:
    return "\r\n".join((f"GET {path} HTTP/1.1", *_heads(key), "connection: close", "", "")).encode()


def _heads(key: str) -> tuple[str, ...]:
    return ("host: x", f"authorization: Bearer {key}", "content-type: application/json")


def web_socket(key: str) -> bytes:
    """A handshake and one message, masked with zeros."""
    text = json.dumps(RESPONSE | {"type": "response.create", "store": False}).encode()
    head = f"GET /v1/responses HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\nupgrade: websocket\r\n"
    head += "connection: Upgrade\r\nsec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    return head.encode() + b"\x81\xfe" + len(text).to_bytes(2, "big") + bytes(4) + text


async def asked(gateway: RunningGateway, kind: str) -> tuple[bytes, bytes]:
    """What a client sends, and what ends the last part of its answer."""
    key, path = gateway.keys.api_key, "/v1/chat/completions"
    if kind == "stream":
        return post(key, path, CHAT), b"data: [DONE]\n\n"
    if kind == "kept stream":
        return post(key, path, CHAT, "idempotency-key: once"), b"data: [DONE]\n\n"
    if kind == "web socket":
        return web_socket(key), b'"type":"response.incomplete"'
    async with gateway.session() as session:
        made = await (await session.post("/v1/responses", json=RESPONSE | {"background": True})).json()
    return get(key, f"/v1/responses/{made['id']}?stream=true"), b"data: [DONE]\n\n"


@contextlib.asynccontextmanager
async def serving(
    home: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch, write_timeout_s: float
) -> AsyncIterator[tuple[RunningGateway, ScriptedWorker]]:
    monkeypatch.setattr("gateway.http.sse.HOLD_EVERY_S", HOLD_EVERY_S)
    for bound in ("MAX_QUEUE_BYTES", "MAX_SYSTEM_BYTES"):  # a short answer fills them
        monkeypatch.setattr(f"gateway.http.http_limits.{bound}", 16 * 1024)
    async with (
        running_gateway(home / "home", redis_url, write_timeout_s=write_timeout_s) as gateway,
        ScriptedWorker(home / "w0.sock", redis_url=redis_url, journal_dir=home / "w0") as worker,
    ):
        await gateway.workers(1)
        worker.runner.step_s = 0.002  # many writes, so that the wait is between two of them
        yield gateway, worker


async def unread(gateway: RunningGateway, request: bytes) -> socket.socket:
    """A client that sends a request and reads nothing. It is returned once writing waits for it."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", gateway.port))
    await loop.sock_sendall(client, request)
    server = gateway.runner.server
    assert server is not None
    await until(lambda: any(one.writing_paused for one in server.connections))
    return client


async def rest_of(client: socket.socket, end: bytes) -> bytes:
    """All that comes until the end, or until the connection ends."""
    found = b""
    async with asyncio.timeout(30):
        while end not in found[-70_000:]:
            part = await asyncio.get_running_loop().sock_recv(client, 65_536)
            if not part:
                break
            found += part
    return found


@pytest.mark.parametrize("kind", ["stream", "kept stream", "background stream", "web socket"])
async def test_a_client_that_pauses_for_less_than_the_write_timeout_gets_all_and_pays_once(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """It was taken for one that had left, at the second look at the connection."""
    async with serving(tmp_path, redis_url, monkeypatch, write_timeout_s=60.0) as (gateway, _):
        request, end = await asked(gateway, kind)
        client = await unread(gateway, request)
        await asyncio.sleep(6 * HOLD_EVERY_S)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 256 * 1024)
        assert end in await rest_of(client, end)
        client.close()
        await gateway.balanced()
        [(output,)] = await gateway.sql("SELECT output FROM ledger_entry WHERE kind = 'settle'")
        assert output == NUM_TOKENS


@pytest.mark.parametrize("kind", ["stream", "web socket"])
async def test_a_client_that_never_reads_on_is_dropped_after_the_write_timeout(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    async with serving(tmp_path, redis_url, monkeypatch, write_timeout_s=0.5) as (gateway, worker):
        request, end = await asked(gateway, kind)
        started = asyncio.get_running_loop().time()
        client = await unread(gateway, request)
        await until(lambda: not worker.engine.attempts)
        assert asyncio.get_running_loop().time() - started > 0.4
        await gateway.settled()
        [(outcome,)] = await gateway.sql("SELECT outcome FROM ledger_entry WHERE kind = 'settle'")
        assert outcome == "client_gone"
        with contextlib.suppress(ConnectionError):
            assert end not in await rest_of(client, end)
        client.close()
