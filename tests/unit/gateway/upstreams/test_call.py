"""One request at upstreams: what is left of it once nobody waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from gateway.base.upstream_source import UpstreamModel, UpstreamSource
from gateway.routing.links.link import Mailbox
from gateway.upstreams import exchange
from gateway.upstreams.breaker import FIRST_WAIT_S
from gateway.upstreams.call import Order, UpstreamCall
from gateway.upstreams.outcomes import of_status
from gateway.upstreams.place import Place
from gateway.upstreams.wires.values import Ask, Chunk, Interval, Upstream


async def test_a_call_that_is_closed_leaves_no_upstream_on_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the client of the one that tried had gone, nothing was sent to the model until a restart."""
    clock, began = [0.0], asyncio.Event()
    source = UpstreamSource(url="http://127.0.0.1:1/v1", models={"m": UpstreamModel()})
    place = Place(Upstream("mock", source), lambda: clock[0])
    place.failed("m", of_status(404, {}, b""))
    clock[0] = FIRST_WAIT_S
    assert place.takes_work("m")

    async def chunks(*_: Any) -> AsyncIterator[Sequence[Chunk]]:
        began.set()
        await asyncio.Event().wait()
        yield ()

    monkeypatch.setattr(exchange, "chunks", chunks)
    order = Order("req_1", "m", Ask("chat", {"messages": []}, 1, 5, Interval(0, 1, 100)), 5)
    ended = asyncio.Event()
    session: Any = None
    call = UpstreamCall(order, lambda tried: place, session, Mailbox(), 0, lambda _: ended.set())
    await began.wait()
    assert not place.takes_work("m"), "one tries already"
    call.close()
    await ended.wait()
    assert (place.takes_work("m"), place.num_running) == (True, 0)
    assert (place.attempts["cut"], call.bought) == (1, [])
