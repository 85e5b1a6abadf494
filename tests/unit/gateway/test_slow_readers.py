from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp.base_protocol import BaseProtocol

from gateway.http.http_limits import MIN_READ_BYTES, GatewayProtocol


class Connection:
    """A connection on which writing waits, with the bytes that are unsent at each look."""

    def __init__(self, unsent: list[int]) -> None:
        self.unsent = unsent
        self.num_looks = 0
        self.is_dropped = False
        self.next: Callable[[], None] | None = None

    def get_write_buffer_size(self) -> int:
        self.num_looks += 1
        return self.unsent[self.num_looks - 1]

    def abort(self) -> None:
        self.is_dropped = True

    def call_later(self, _delay_s: float, what: Callable[..., None], *args: Any) -> None:
        self.next = lambda: what(*args)


def watched(unsent: list[int]) -> Connection:
    connection = Connection(unsent)
    protocol = GatewayProtocol.__new__(GatewayProtocol)
    protocol._loop = connection
    protocol._limits = SimpleNamespace(write_timeout_s=30.0)
    protocol._watch_reader(connection)
    while connection.num_looks < len(unsent) and not connection.is_dropped:
        assert connection.next is not None
        connection.next()
    return connection


@pytest.mark.parametrize(
    "lumps",
    [[0, 2 * MIN_READ_BYTES] * 3, [MIN_READ_BYTES] * 6, [0, MIN_READ_BYTES] * 3],
    ids=["large", "even", "least"],
)
def test_a_client_whose_system_takes_bytes_in_lumps_is_read_slowly_and_not_dropped(lumps):
    """It was cut in the first write timeout in which nothing left, though it read twice what it must."""
    unsent = [10_000_000]
    for lump in lumps:
        unsent.append(unsent[-1] - lump)
    assert not watched(unsent).is_dropped


@pytest.mark.parametrize("num_read", [0, MIN_READ_BYTES - 1])
def test_a_client_that_reads_too_little_in_two_write_timeouts_is_dropped(num_read):
    found = watched([10_000_000, 10_000_000, 10_000_000 - num_read, 0])
    assert found.is_dropped
    assert found.num_looks == 3


def waited_for() -> GatewayProtocol:
    """The protocol of an open connection on which writing waits."""
    protocol = GatewayProtocol.__new__(GatewayProtocol)
    protocol._loop = asyncio.get_running_loop()
    protocol.transport = SimpleNamespace()
    protocol._paused, protocol._drain_waiter, protocol._unread_timer = True, None, None
    return protocol


async def given_up(protocol: GatewayProtocol) -> None:
    """A writer waits, and gives up."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await protocol._drain_helper()


async def test_a_writer_that_gives_up_ends_nobody_elses_wait():
    """aiohttp cancelled those that waited beside it, and all that waited later."""
    protocol = waited_for()
    beside = asyncio.create_task(protocol._drain_helper())
    await given_up(protocol)
    later = asyncio.create_task(protocol._drain_helper())
    done, _ = await asyncio.wait((beside, later), timeout=0)
    assert not done
    protocol.resume_writing()
    await asyncio.gather(beside, later)
    await protocol._drain_helper()


async def test_who_waits_hears_that_the_connection_is_lost():
    protocol = waited_for()
    await given_up(protocol)
    waiting = asyncio.create_task(protocol._drain_helper())
    await asyncio.sleep(0)
    BaseProtocol.connection_lost(protocol, OSError("reset"))
    with pytest.raises(ConnectionError):
        await waiting
    with pytest.raises(ConnectionError):
        await protocol._drain_helper()
