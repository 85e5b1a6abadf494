"""The base URL over TLS: who is served, who is not, and what becomes of a certificate that changes."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx2 as httpx
import openai
import pytest
import pytest_asyncio
from certificates import Authority
from fakes import ScriptedWorker
from gateways import MODEL, RunningGateway, running_gateway, until
from redis_db import emptied

from gateway.listening.tls import CERTIFICATES
from gateway.telemetry.metrics import METRICS
from workers.process.tls.listener import CLOSING_S

pytestmark = pytest.mark.asyncio(loop_scope="module")

MESSAGES: Any = [{"role": "user", "content": "hi"}]
HANDSHAKE_S = 1.0
MAX_PER_ADDRESS = 8
NUM_FILE_BYTES = 300_000
"""The length of an answer that the gateway has written whole before its client takes it."""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def gateway(
    redis_socket: Path, tmp_path_factory: pytest.TempPathFactory, authority: Authority
) -> AsyncIterator[RunningGateway]:
    directory = tmp_path_factory.mktemp("gateway")
    redis_url = emptied(redis_socket, 3)
    pair = authority.sign("listener", "127.0.0.1", "localhost")
    limits = {"headers_s": HANDSHAKE_S, "max_connections_per_address": MAX_PER_ADDRESS, "unlimited_networks": ()}
    async with (
        running_gateway(directory / "home", redis_url, tls_cert=pair.cert, tls_key=pair.key, **limits) as gateway,
        ScriptedWorker(directory / "w0.sock", redis_url=redis_url),
    ):
        await gateway.workers(1)
        yield gateway


def trusting(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=authority.ca)


@contextlib.asynccontextmanager
async def official(gateway: RunningGateway, authority: Authority) -> AsyncIterator[openai.AsyncOpenAI]:
    async with httpx.AsyncClient(verify=trusting(authority)) as client:
        yield gateway.client(http_client=client)


def failures(gateway: RunningGateway) -> float:
    return gateway.app[METRICS].registry.get_sample_value("headgate_tls_handshakes_failed_total") or 0.0


async def is_served(gateway: RunningGateway, authority: Authority) -> bool:
    connector = aiohttp.TCPConnector(ssl=trusting(authority))
    async with aiohttp.ClientSession(connector=connector) as session, session.get(f"{gateway.url}/livez") as answer:
        return answer.status == 200


async def test_the_official_client_is_answered_and_streamed_to(gateway: RunningGateway, authority: Authority) -> None:
    async with official(gateway, authority) as client:
        whole = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8, seed=1)
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8, seed=1, stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    assert whole.choices[0].message.content == "".join(pieces) != ""


async def test_it_is_tls_of_today_and_http_1_1(gateway: RunningGateway, authority: Authority) -> None:
    context = trusting(authority)
    context.set_alpn_protocols(["h2", "http/1.1"])
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.port, ssl=context)
    spoken = writer.get_extra_info("ssl_object")
    assert (spoken.version(), spoken.selected_alpn_protocol()) == ("TLSv1.3", "http/1.1")
    writer.close()
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises((ssl.SSLError, ConnectionResetError)):
        await asyncio.open_connection("127.0.0.1", gateway.port, ssl=context)


async def test_a_client_that_does_not_know_the_authority_refuses_the_gateway(gateway: RunningGateway) -> None:
    before = failures(gateway)
    with pytest.raises(ssl.SSLCertVerificationError):
        await asyncio.open_connection("127.0.0.1", gateway.port, ssl=ssl.create_default_context())
    await until(lambda: failures(gateway) > before)


async def test_plain_http_is_closed_and_no_fault_of_ours(
    gateway: RunningGateway, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    before = failures(gateway)
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
    with contextlib.suppress(ConnectionResetError):
        assert b"HTTP" not in await reader.read()
    writer.close()
    assert failures(gateway) == before + 1
    assert not [record for record in caplog.records if record.levelname in {"WARNING", "ERROR"}]
    assert await is_served(gateway, authority)


async def test_handshakes_that_do_not_end_are_bounded_and_end(gateway: RunningGateway, authority: Authority) -> None:
    server = gateway.runner.server
    await until(lambda: server.addresses.total == 0)
    silent = [await asyncio.open_connection("127.0.0.1", gateway.port) for _ in range(MAX_PER_ADDRESS)]
    await until(lambda: server.addresses.total == MAX_PER_ADDRESS)
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    assert await reader.read() == b"", "one more than an address may have"
    writer.close()
    for reader, writer in silent:
        assert await reader.read() == b"", "the time for a handshake is over"
        writer.close()
    await until(lambda: server.addresses.total == 0)
    assert await is_served(gateway, authority)


async def test_a_refused_body_is_answered_although_half_a_connection_cannot_close(
    gateway: RunningGateway, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """Without TLS the gateway ends its half after an early answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port, ssl=trusting(authority))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {gateway.keys.api_key}\r\n"
    writer.write(f"{head}content-type: application/json\r\ncontent-length: 900000000\r\n\r\n".encode() + bytes(100_000))
    answer = await reader.readuntil(b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413")
    for _ in range(5):  # what still comes is read and dropped, so that the client sees its answer
        writer.write(bytes(100_000))
        await writer.drain()
    assert b"request_too_large" in await reader.readuntil(b"}")
    writer.close()
    await until(lambda: gateway.runner.server.addresses.total == 0)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_an_answer_whose_connection_closes_reaches_a_slow_reader(
    gateway: RunningGateway, authority: Authority
) -> None:
    """The client pauses for longer than the end of a link may take, with most of the answer unsent."""
    async with official(gateway, authority) as client:
        kept = await client.files.create(file=("a.bin", bytes(NUM_FILE_BYTES)), purpose="user_data")
    head = f"GET /v1/files/{kept.id}/content HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {gateway.keys.api_key}\r\n"
    asked = f"{head}connection: close\r\n\r\n".encode()
    answer = await asyncio.to_thread(taken_slowly, gateway.port, trusting(authority), asked)
    assert answer.startswith(b"HTTP/1.1 200")
    assert len(answer.partition(b"\r\n\r\n")[2]) == NUM_FILE_BYTES


def taken_slowly(port: int, context: ssl.SSLContext, asked: bytes) -> bytes:
    """Returns an answer, of which nothing is read for a while."""
    with socket.socket() as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
        plain.connect(("127.0.0.1", port))
        with context.wrap_socket(plain, server_hostname="127.0.0.1") as spoken, contextlib.suppress(OSError):
            spoken.sendall(asked)
            time.sleep(CLOSING_S + 0.3)
            return b"".join(iter(lambda: spoken.recv(16 * 1024), b""))
    return b""


async def test_a_client_that_leaves_within_its_body_is_no_fault_of_ours(
    gateway: RunningGateway, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.port, ssl=trusting(authority))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {gateway.keys.api_key}\r\n"
    writer.write(f"{head}content-type: application/json\r\ncontent-length: 1000\r\n\r\n{{".encode())
    await writer.drain()
    writer.close()
    await until(lambda: gateway.runner.server.addresses.total == 0)
    assert not [record for record in caplog.records if record.name == "asyncio" or record.levelname == "ERROR"]


async def test_the_consoles_cookie_is_secure_and_browsers_keep_to_tls(
    gateway: RunningGateway, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusting(authority))) as session:
        form = {"key": gateway.keys.api_key, "next": "/console"}
        async with session.post(f"{gateway.url}/console/sign-in", data=form, allow_redirects=False) as answer:
            assert answer.status == 303
            assert answer.cookies["headgate_console"]["secure"]
            assert answer.headers["strict-transport-security"] == "max-age=604800"
        named = gateway.url.replace("127.0.0.1", "localhost")
        async with session.get(f"{named}/console/sign-in") as answer:
            assert "strict-transport-security" not in answer.headers


async def test_a_new_certificate_is_used_and_connections_stay(
    gateway: RunningGateway, authority: Authority, tmp_path: Path
) -> None:
    certificates = gateway.app[CERTIFICATES]
    assert certificates.listener is not None
    files = certificates.listener.files
    async with official(gateway, authority) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=200, stream=True)
        await anext(stream)
        other = Authority(tmp_path)
        pair = other.sign("listener", "127.0.0.1", days=30)
        for new, used in ((pair.cert, files.cert.path), (pair.key, files.key.path)):
            shutil.copy(new, used)
        before = certificates.listener.ends_at
        await certificates.look()
        assert certificates.listener.ends_at < before
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await is_served(gateway, authority)
        assert await is_served(gateway, other)
        async for chunk in stream:
            last = chunk
        assert last.choices[0].finish_reason == "length"


async def test_files_that_cannot_be_used_leave_the_certificate_in_use(
    gateway: RunningGateway, caplog: pytest.LogCaptureFixture
) -> None:
    """It goes on from where the test above has left."""
    certificates = gateway.app[CERTIFICATES]
    assert certificates.listener is not None
    cert = certificates.listener.files.cert.path
    good, context = cert.read_bytes(), certificates.listener.newest
    cert.write_bytes(good[:200])
    await certificates.look()
    await certificates.look()
    assert [record.event for record in caplog.records if record.levelname == "ERROR"] == ["certificate_unusable"]
    assert certificates.listener.newest is context
    assert gateway.app[METRICS].registry.get_sample_value("headgate_tls_certificate_unusable", {"use": "listener"})
    cert.write_bytes(good)
    await certificates.look()
    assert certificates.listener.fault == ""
