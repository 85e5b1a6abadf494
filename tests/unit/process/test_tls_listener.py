"""The listener for TLS, on both loops that processes run on: asyncio's in workers, uvloop in gateways."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from certificates import Authority

from workers.process.tls.certificates import Certificate, Files, Setting, https_context
from workers.process.tls.listener import Hands, TlsListener

LOOPS = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
SYSTEM_BYTES = 16 * 1024
NUM_BYTES = 512 * 1024
"""The length of an answer that the system does not take at once."""


class Echo(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


class Answer(asyncio.Protocol):
    """Answers with many bytes and closes the connection."""

    def connection_made(self, transport: Any) -> None:
        transport.write(bytes(NUM_BYTES))
        transport.close()


class Served:
    def __init__(
        self,
        directory: Path,
        handshake_s: float = 20.0,
        closing_s: float = 20.0,
        protocol: Callable[[], asyncio.Protocol] = Echo,
    ) -> None:
        self.authority = Authority(directory)
        pair = self.authority.sign("listener", "127.0.0.1")
        self.certificate = Certificate(Files(Setting("CERT", pair.cert), Setting("KEY", pair.key)), https_context)
        opened = socket.create_server(("127.0.0.1", 0))
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SYSTEM_BYTES)
        self.port = opened.getsockname()[1]
        self.failures: list[tuple[str, str]] = []
        self.refuses = False
        hands = Hands(
            lambda _: None if self.refuses else protocol(), lambda _, address, why: self.failures.append((address, why))
        )
        self.listener = TlsListener([opened], self.certificate.context, hands, handshake_s, closing_s)

    async def dial(self, context: ssl.SSLContext | None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, ssl=context)

    async def echoes(self) -> bool:
        reader, writer = await self.dial(ssl.create_default_context(cafile=self.authority.ca))
        writer.write(b"hello")
        answer = await reader.readexactly(5)
        writer.close()
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            await writer.wait_closed()
        return answer == b"hello"

    async def failure(self) -> tuple[str, str]:
        async with asyncio.timeout(20):
            while not self.failures:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)
        return self.failures.pop()


def run(loop: Callable[[], asyncio.AbstractEventLoop], test: Callable[[], Awaitable[None]]) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(test())


@LOOPS
def test_bytes_that_come_with_the_handshake_are_not_lost(loop: Any, tmp_path: Path) -> None:
    async def test() -> None:
        served = Served(tmp_path)
        assert all(await asyncio.gather(*(served.echoes() for _ in range(20))))
        assert served.listener.num_handshakes == 0
        served.listener.close()

    run(loop, test)


@LOOPS
@pytest.mark.parametrize(
    ("first", "why"),
    [
        (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", "it speaks HTTP without TLS"),
        (b"\x00\x00\x00\x20" + b"x" * 32, "it does not speak TLS"),
        (b"", "it ended the connection during the handshake"),
    ],
    ids=["HTTP", "a frame", "nothing"],
)
def test_who_does_not_speak_tls_is_told_apart(loop: Any, first: bytes, why: str, tmp_path: Path) -> None:
    async def test() -> None:
        served = Served(tmp_path)
        _, writer = await served.dial(None)
        if first:
            writer.write(first)
        else:
            writer.close()
        address, said = await served.failure()
        assert address == "127.0.0.1"
        assert said.startswith(why)
        writer.close()
        assert await served.echoes()
        served.listener.close()

    run(loop, test)


@LOOPS
def test_a_handshake_that_does_not_end_is_ended_and_holds_up_nobody(loop: Any, tmp_path: Path) -> None:
    async def test() -> None:
        served = Served(tmp_path, handshake_s=0.5)
        reader, writer = await served.dial(None)
        assert await served.echoes()
        assert await reader.read() == b""
        assert (await served.failure())[1] == "it did not finish its handshake in time"
        writer.close()
        served.listener.close()

    run(loop, test)


@LOOPS
def test_connections_go_on_when_the_listener_is_closed_and_handshakes_do_not(loop: Any, tmp_path: Path) -> None:
    async def test() -> None:
        served = Served(tmp_path)
        reader, writer = await served.dial(ssl.create_default_context(cafile=served.authority.ca))
        silent, silent_writer = await served.dial(None)
        await served.echoes()
        served.listener.close()
        await served.listener.wait_closed()
        assert await silent.read() == b""
        writer.write(b"still")
        assert await reader.readexactly(5) == b"still"
        with pytest.raises(ConnectionRefusedError):
            await served.dial(None)
        for one in (writer, silent_writer):
            one.close()

    run(loop, test)


@LOOPS
@pytest.mark.parametrize(("closing_s", "is_whole"), [(20.0, True), (0.1, False)], ids=["in time", "too late"])
def test_a_slow_reader_gets_what_is_unsent_at_a_close(
    loop: Any, closing_s: float, is_whole: bool, tmp_path: Path
) -> None:
    async def test() -> None:
        served = Served(tmp_path, closing_s=closing_s, protocol=Answer)
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SYSTEM_BYTES)
        slow.setblocking(False)
        await asyncio.get_running_loop().sock_connect(slow, ("127.0.0.1", served.port))
        context = ssl.create_default_context(cafile=served.authority.ca)
        reader, writer = await asyncio.open_connection(
            sock=slow, ssl=context, server_hostname="127.0.0.1", limit=SYSTEM_BYTES
        )
        await asyncio.sleep(0.5)
        found = b""
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            while piece := await reader.read(SYSTEM_BYTES):
                found += piece
        assert (len(found) == NUM_BYTES) is is_whole
        writer.close()
        served.listener.close()

    run(loop, test)


@LOOPS
def test_who_is_refused_costs_no_handshake(loop: Any, tmp_path: Path) -> None:
    async def test() -> None:
        served = Served(tmp_path)
        served.refuses = True
        reader, writer = await served.dial(None)
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        assert served.listener.num_handshakes == 0
        served.listener.close()

    run(loop, test)


@LOOPS
def test_a_renewed_certificate_is_used_by_the_next_handshake(loop: Any, tmp_path: Path) -> None:
    async def test() -> None:
        served = Served(tmp_path)
        before = await fingerprint(served)
        served.authority.sign("listener", "127.0.0.1")
        served.certificate.look()
        assert await fingerprint(served) != before
        served.listener.close()

    run(loop, test)


async def fingerprint(served: Served) -> bytes:
    _, writer = await served.dial(ssl.create_default_context(cafile=served.authority.ca))
    shown: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return shown
