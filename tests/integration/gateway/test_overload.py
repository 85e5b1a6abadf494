"""A tenant whom workers refuse is refused at the front, before anything is done for it; others are not."""

from __future__ import annotations

import asyncio
import time

import aiohttp
import pytest
from fakes import ScriptedWorker
from gateways import MODEL, RunningGateway

from gateway.intake import throttle
from gateway.intake.throttle import JITTER

RETRY_S = 5.0


@pytest.fixture
def asked(worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When the worker was asked. It refuses everybody."""
    asked: list[float] = []

    def refuse(attempt: object, now: float) -> float:
        asked.append(now)
        return RETRY_S

    monkeypatch.setattr(worker.engine.scheduler, "refuse", refuse)
    return asked


async def ask(session: aiohttp.ClientSession, text: str) -> tuple[int, int, str | None]:
    """Status, milliseconds told, code."""
    messages = [{"role": "user", "content": text}]
    content = {"model": MODEL, "messages": messages, "max_tokens": 2}
    async with session.post("/v1/chat/completions", json=content) as answer:
        reply = await answer.json()
        told = int(answer.headers.get("retry-after-ms", "0"))
        return answer.status, told, reply.get("error", {}).get("code")


async def test_a_flood_reaches_the_worker_in_part_and_hears_the_same(
    gateway: RunningGateway, asked: list[float]
) -> None:
    async with gateway.session() as session:
        for n in range(150):
            await ask(session, f"before {n}")
        num_asked = len(asked)
        answers = [await ask(session, f"flood {n}") for n in range(150)]
        assert {(status, code) for status, _, code in answers} == {(503, "overloaded")}
        assert 1 <= len(asked) - num_asked <= 60, "a worker that takes nothing was asked in vain"
        least, most = 1000 * RETRY_S * (1 - JITTER) - 1, 1000 * RETRY_S * (1 + JITTER)
        assert all(least <= told <= most for _, told, _ in answers)


async def test_a_refusal_at_the_front_costs_no_admission(gateway: RunningGateway, asked: list[float]) -> None:
    async with gateway.session() as session:
        for n in range(150):
            await ask(session, f"flood {n}")
    await gateway.settled()
    rows = await gateway.sql("SELECT outcome FROM ledger_entry WHERE kind = 'void'")
    assert len(rows) == len(asked) < 150


async def test_it_opens_when_the_worker_has_refused_nobody_for_a_while(
    gateway: RunningGateway, worker: ScriptedWorker, asked: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway.session() as session:
        for n in range(100):
            await ask(session, f"flood {n}")
        monkeypatch.setattr(worker.engine.scheduler, "refuse", lambda attempt, now: 0.0)
        monkeypatch.setattr(throttle, "OPEN_S", 0.3)
        await asyncio.sleep(0.4)
        started = time.monotonic()
        answers = [await ask(session, f"calm {n}") for n in range(10)]
        assert {status for status, _, _ in answers} == {200}, time.monotonic() - started
