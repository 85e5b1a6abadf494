"""A connection hands on messages where they are read, and ends as its iterator does."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable

import pytest
import uvloop
from load import stretched

from workers.protocol import connection
from workers.protocol.connection import Connection
from workers.protocol.frames import FrameError, encode
from workers.protocol.messages import Alive, Cancel, Message

SENT: list[Message] = [Alive(), Cancel("req_1", 0, "stop"), Alive()]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def runner(request: pytest.FixtureRequest):
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner


async def listened(
    talk: Callable[[socket.socket], AsyncIterator[None]], handle: Callable[[list[Message]], None]
) -> None:
    """Listens while the peer says a piece at a time."""
    ours, theirs = socket.socketpair()
    link = Connection(*await asyncio.open_connection(sock=ours))
    listening = asyncio.create_task(link.listen(handle))
    with theirs, contextlib.suppress(BrokenPipeError):  # nobody listens any more
        async for _ in talk(theirs):
            await asyncio.sleep(0.001)
    try:
        async with asyncio.timeout(stretched(10)):
            await listening
    finally:
        link.abort()
        await asyncio.sleep(0)  # for the end of its transport


async def byte_by_byte(peer: socket.socket) -> AsyncIterator[None]:
    for number in b"".join(map(encode, SENT)):
        peer.send(bytes([number]))
        yield


async def all_at_once(peer: socket.socket) -> AsyncIterator[None]:
    peer.sendall(b"".join(map(encode, SENT)))
    peer.close()  # what was said and the end are read in one turn of the loop
    for _ in range(1):
        yield


async def garbage(peer: socket.socket) -> AsyncIterator[None]:
    peer.sendall(encode(Alive()))
    yield
    peer.sendall(b"\xff" * 8)
    yield


@pytest.mark.parametrize("talk", [byte_by_byte, all_at_once])
def test_every_message_is_handed_on_in_order(runner: asyncio.Runner, talk) -> None:
    heard: list[Message] = []
    runner.run(listened(talk, heard.extend))
    assert heard == SENT


def test_what_is_no_frame_is_raised(runner: asyncio.Runner) -> None:
    with pytest.raises(FrameError):
        runner.run(listened(garbage, lambda _: None))


@pytest.mark.parametrize("number", [1, 2])
def test_a_fault_of_the_handler_is_raised(runner: asyncio.Runner, number: int) -> None:
    heard: list[Message] = []

    def fail(messages: list[Message]) -> None:
        heard.extend(messages)
        if len(heard) >= number:
            raise LookupError

    with pytest.raises(LookupError):
        runner.run(listened(byte_by_byte, fail))


def test_a_silent_peer_is_lost(runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SILENCE_S", 0.05)

    async def silent() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.send(encode(Alive()))
            link = Connection(*await asyncio.open_connection(sock=ours))
            async with asyncio.timeout(stretched(10)):
                await link.listen(lambda _: None)
            link.abort()

    runner.run(silent())
