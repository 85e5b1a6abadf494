"""The listener for links: who may begin a handshake beside others, and on which addresses it listens."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from certificates import CLIENT, Authority

from workers.engine.link_listener import MAX_HANDSHAKES, MAX_HANDSHAKES_PER_ADDRESS, listen
from workers.process.tls.certificates import Certificate, Files, Setting, dialling_context, listening_context
from workers.protocol.connection import dial


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        number: int = found.getsockname()[1]
    return number


def certificate(authority: Authority, *of: str, make: Any, **how: Any) -> Certificate:
    pair = authority.sign("link", *of, **how)
    return Certificate(Files(Setting("CERT", pair.cert), Setting("KEY", pair.key), Setting("CA", authority.ca)), make)


@contextlib.asynccontextmanager
async def listening(authority: Authority, address: str) -> AsyncIterator[None]:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    of_worker = certificate(authority, "127.0.0.1", "127.0.0.2", "localhost", make=listening_context)
    listener = await listen(address, of_worker, serve)
    try:
        yield
    finally:
        listener.close()
        await listener.wait_closed()


async def test_one_address_with_silent_handshakes_keeps_no_other_out(authority: Authority, port: int) -> None:
    async with listening(authority, f"tcp:127.0.0.1:{port}"):
        silent = [
            await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0)) for _ in range(MAX_HANDSHAKES)
        ]
        gateway = certificate(authority, make=dialling_context, use=CLIENT)
        link = await dial(f"tcp:127.0.0.1:{port}", gateway.newest)
        num_open = 0
        for reader, writer in silent:
            try:
                async with asyncio.timeout(0.02):
                    assert await reader.read() == b""
            except TimeoutError:
                num_open += 1
            except ConnectionResetError:
                pass
            writer.close()
        assert num_open == MAX_HANDSHAKES_PER_ADDRESS
        link.abort()


async def test_a_name_with_several_addresses_is_listened_on_at_each(
    authority: Authority, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def found(*_: object, **__: object) -> list[Any]:
        kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
        return [(*kind, (host, port)) for host in ("127.0.0.1", "127.0.0.2", "127.0.0.1")]

    with monkeypatch.context() as resolved:
        resolved.setattr(asyncio.get_running_loop(), "getaddrinfo", found)
        started = listening(authority, f"tcp:localhost:{port}")
        await started.__aenter__()
    gateway = certificate(authority, make=dialling_context, use=CLIENT)
    for host in ("127.0.0.1", "127.0.0.2"):
        (await dial(f"tcp:{host}:{port}", gateway.newest)).abort()
    await started.__aexit__(None, None, None)
