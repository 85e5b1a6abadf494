"""S2: a process's own stall is not taken for its peer's silence."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable

import pytest
import uvloop

from workers.protocol import connection
from workers.protocol.connection import Connection
from workers.protocol.frames import encode
from workers.protocol.messages import Alive, Message
from workers.protocol.patience import SilentTime, patience

SILENCE_S = 0.4


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def new_loop(request: pytest.FixtureRequest) -> Callable[[], asyncio.AbstractEventLoop]:
    made: Callable[[], asyncio.AbstractEventLoop] = request.param
    return made


async def _heard(peer: Callable[[socket.socket], None]) -> list[Message]:
    """What a listener hears whose loop stands still past its patience, while its peer does this."""
    ours, theirs = socket.socketpair()
    with theirs:
        link = Connection(*await asyncio.open_connection(sock=ours))
        heard: list[Message] = []

        async def listen() -> None:
            async for messages in link:
                heard.extend(messages)

        listening = asyncio.create_task(listen())
        await asyncio.sleep(SILENCE_S * 0.9)
        threading.Timer(SILENCE_S, peer, [theirs]).start()
        time.sleep(SILENCE_S * 3)  # noqa: ASYNC251 (this is the stall)
        await asyncio.sleep(0.05)
        assert not listening.done()
        await listening
        link.abort()
        return heard


def test_s2_what_came_while_the_own_loop_stood_still_is_heard(
    new_loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "SILENCE_S", SILENCE_S)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(_heard(lambda peer: peer.sendall(encode(Alive())))) == [Alive()]


def test_s2_a_stall_alone_uses_up_no_more_than_a_tick(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def stalled() -> str:
        async with patience(0.4):
            time.sleep(1.0)  # noqa: ASYNC251 (this is the stall)
            await asyncio.sleep(0.01)
            return "patient"

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(stalled()) == "patient"


def test_a_peer_that_is_silent_while_the_loop_runs_is_lost(
    new_loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "SILENCE_S", 0.05)

    async def silent() -> list[list[Message]]:
        ours, theirs = socket.socketpair()
        with theirs:
            link = Connection(*await asyncio.open_connection(sock=ours))
            found = [messages async for messages in link]
            link.abort()
            return found

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(silent()) == []


def test_a_stall_of_the_whole_process_is_not_the_silence_of_its_other_thread() -> None:
    now = 100.0
    silence = SilentTime(2.0, lambda: now)
    now = 101.0
    assert silence.look(100.9) == pytest.approx(0.1)
    now = 111.0  # nothing ran for ten seconds, and the loop runs before the other thread does
    assert silence.look(100.9) == pytest.approx(2.1)
    now = 112.0
    assert silence.look(111.9) == pytest.approx(0.1)


def test_a_thread_that_gives_no_sign_while_the_loop_runs_is_silent_for_all_of_it() -> None:
    now = 100.0
    silence = SilentTime(2.0, lambda: now)
    for _ in range(20):
        now += 1.0
        heard = silence.look(100.0)
    assert heard == pytest.approx(20.0)
