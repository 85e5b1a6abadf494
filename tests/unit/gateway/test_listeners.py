"""The sockets that a gateway listens on."""

from __future__ import annotations

import asyncio
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import pytest
import uvloop
from prometheus_client import CollectorRegistry

from gateway.listening.sockets import BACKLOG, NUM_DESCRIPTORS, ListenerMetrics, descriptors, num_waiting


def clients(address: tuple[str, int], count: int, closed: ExitStack) -> None:
    for _ in range(count):
        closed.enter_context(socket.create_connection(address))


def test_a_burst_of_connections_is_accepted_in_few_turns_of_the_loop() -> None:
    """uvloop accepts one connection of each descriptor in a turn, so that the last of 200 came in the 201st."""
    num_turns, num_accepted = 0, 0

    class Accepted(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            nonlocal num_accepted
            num_accepted += 1
            cast(asyncio.Transport, transport).abort()

    async def main(closed: ExitStack) -> None:
        nonlocal num_turns
        loop = asyncio.get_running_loop()
        opened = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        servers = [await loop.create_server(Accepted, sock=one, backlog=BACKLOG) for one in descriptors(opened)]
        address = opened.getsockname()
        clients(address, 200, closed)
        while num_accepted < 200:  # the turns are what is counted
            num_turns += 1
            await asyncio.sleep(0)
        for server in servers:
            server.close()
        await asyncio.sleep(0)  # uvloop closes at the end of the turn
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)

    with ExitStack() as closed:
        uvloop.run(main(closed))
    assert num_turns <= 200 / NUM_DESCRIPTORS + 5


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the queue of a socket")
def test_connections_that_wait_are_counted() -> None:
    registry = CollectorRegistry()
    with ExitStack() as closed, socket.create_server(("127.0.0.1", 0), backlog=BACKLOG) as opened:
        registry.register(ListenerMetrics(opened))
        assert registry.get_sample_value("headgate_connections_waiting") == 0
        clients(opened.getsockname(), 3, closed)
        assert registry.get_sample_value("headgate_connections_waiting") == 3
        opened.accept()[0].close()
        assert num_waiting(opened) == 2
    assert num_waiting(opened) == 0


def test_the_queue_of_a_unix_socket_is_unknown(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(str(tmp_path / "s"))
        opened.listen()
        assert num_waiting(opened) == 0
        first, *others = descriptors(opened)
        assert first is opened and len(others) == NUM_DESCRIPTORS - 1
        for other in others:
            assert other.getsockname() == opened.getsockname()
            other.close()
