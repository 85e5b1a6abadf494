"""Background work of a gateway that a fault of ours ended begins again, and is counted."""

from __future__ import annotations

import asyncio

import pytest
from gateways import MODEL, RunningGateway

from gateway.base.app_keys import FORGETS, REDIS
from gateway.generation.stream import GENERATION
from gateway.limiter.redis_keys import REVOKED_CHANNEL
from gateway.telemetry.metrics import METRICS
from workers.process import rounds


@pytest.fixture(autouse=True)
def begins_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "AGAIN_S", 0.05)


def num_faults(gateway: RunningGateway, work: str) -> float:
    found = gateway.app[METRICS].registry.get_sample_value("headgate_background_failures_total", {"work": work})
    return found or 0.0


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - another task has no event
            await asyncio.sleep(0.02)


async def test_a_gateway_whose_search_for_workers_ended_by_a_fault_links_them_again_and_answers_go_on(
    gateway: RunningGateway, monkeypatch
) -> None:
    fleet, before = gateway.app[GENERATION].fleet, num_faults(gateway, "Fleet.run")
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 50, "ignore_eos": True}
    look = fleet._look

    async def broken():
        monkeypatch.setattr(fleet, "_look", look)
        raise RuntimeError("a fault of ours")

    async with gateway.session() as session:
        async with session.post("/v1/chat/completions", json=body | {"stream": True}) as answer:
            await answer.content.readline()
            monkeypatch.setattr(fleet, "_look", broken)
            fleet.look_soon()
            await until(lambda: num_faults(gateway, "Fleet.run") == before + 1)
            assert b"data: [DONE]" in await answer.read()
        await until(lambda: fleet.links)
        async with session.post("/v1/chat/completions", json=body) as answer:
            assert answer.status == 200


async def test_a_gateway_whose_hearing_of_changes_ended_by_a_fault_hears_again(gateway: RunningGateway) -> None:
    before, heard, forgets = num_faults(gateway, "hear_changes"), [], gateway.app[FORGETS]

    def faulty() -> None:
        heard.append(1)
        if len(heard) == 1:
            raise RuntimeError("a fault of ours")

    forgets.append(faulty)
    await gateway.app[REDIS].publish(REVOKED_CHANNEL, "")
    await until(lambda: num_faults(gateway, "hear_changes") == before + 1)
    async with asyncio.timeout(30):
        while len(heard) < 2:
            await gateway.app[REDIS].publish(REVOKED_CHANNEL, "")
            await asyncio.sleep(0.05)
