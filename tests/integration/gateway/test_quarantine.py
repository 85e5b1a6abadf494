"""A request under which workers end is suspected, runs apart, and is refused; nobody else's is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fakes import ScriptedWorker
from gateways import MODEL, RunningGateway, until

from gateway.generation.stream import GENERATION
from gateway.routing.links.quarantine import Quarantine


class Workers:
    """Scripted workers, each a new process in a slot of its own or of one that ended."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        self._folder, self._redis_url = folder, redis_url
        self._names: Iterator[int] = iter(range(100))

    @asynccontextmanager
    async def one(self, slot: int = 0, **options: Any):
        path = self._folder / f"w{next(self._names)}.sock"
        async with ScriptedWorker(path, redis_url=self._redis_url, slot=slot, **options) as worker:
            yield worker


@pytest.fixture(autouse=True)
def lost_at_once(bare_gateway: RunningGateway) -> None:
    """Each request is sent once here; `test_resumes.py` has those that another worker goes on with."""
    bare_gateway.loses_at_once()


@pytest.fixture
def workers(tmp_path: Path, redis_url: str) -> Workers:
    return Workers(tmp_path, redis_url)


async def ask(
    session: aiohttp.ClientSession, prompt: str = "deadly", **more: Any
) -> tuple[int, str | None, str | None]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, **more}
    async with session.post("/v1/completions", json=body) as answer:
        reply = await answer.json()
        return answer.status, reply.get("error", {}).get("code"), answer.headers.get("x-should-retry")


async def crash_under(gateway: RunningGateway, workers: Workers, session: aiohttp.ClientSession, *prompts: str) -> list:
    """The answers to these prompts, while which a worker ends before its first step."""
    async with workers.one() as worker:
        await gateway.workers(1)
        worker.runner.hang()
        asked = [asyncio.create_task(ask(session, prompt)) for prompt in prompts]
        await until(lambda: len(worker.engine.attempts) == len(prompts))
        worker.crash()
        answers = await asyncio.gather(*asked)
    await gateway.workers(0)
    return answers


def quarantine_of(gateway: RunningGateway) -> Quarantine:
    return gateway.app[GENERATION].fleet.quarantine


async def test_a_request_that_ended_two_workers_is_refused_and_nobody_elses_is(bare_gateway, workers):
    gateway = bare_gateway
    _, stranger = await gateway.new_tenant("stranger")
    async with gateway.session() as session, gateway.session(stranger) as other:
        assert await crash_under(gateway, workers, session, "deadly") == [(503, "upstream_lost", None)]
        assert await crash_under(gateway, workers, session, "deadly") == [(500, "request_quarantined", "false")]
        async with workers.one() as worker:
            await gateway.workers(1)
            assert await ask(session) == (500, "request_quarantined", "false")
            assert await ask(session, stream=True) == (500, "request_quarantined", "false")
            assert worker.num_tokens_sent == 0
            assert (await ask(session, "harmless"))[0] == 200
            assert (await ask(other))[0] == 200
            assert quarantine_of(gateway).counts() == (1, 1)
    await gateway.settled()
    rows = await gateway.sql(
        "SELECT kind, count(*) AS num FROM ledger_entry WHERE outcome = 'worker_lost' GROUP BY kind"
    )
    assert [(row.kind, row.num) for row in rows] == [("void", 2)]  # a refused one is not begun, and nobody pays


async def test_a_suspect_that_gets_through_is_an_ordinary_request_again(bare_gateway, workers):
    async with bare_gateway.session() as session:
        await crash_under(bare_gateway, workers, session, "unlucky")
        async with workers.one():
            await bare_gateway.workers(1)
            assert (await ask(session, "unlucky"))[0] == 200
        await bare_gateway.workers(0)
        assert quarantine_of(bare_gateway).is_empty
        assert await crash_under(bare_gateway, workers, session, "unlucky") == [(503, "upstream_lost", None)]


async def test_suspects_run_apart_from_each_other_and_beside_everybody_else(bare_gateway, workers):
    async with bare_gateway.session() as session:
        await crash_under(bare_gateway, workers, session, "first", "second", "third")
        async with workers.one(0, tokens_per_s=1) as one, workers.one(1, tokens_per_s=1) as other:
            await bare_gateway.workers(2)
            suspects = [
                asyncio.create_task(ask(session, prompt, max_tokens=15)) for prompt in ("first", "second", "third")
            ]
            await until(lambda: len(one.engine.attempts) == len(other.engine.attempts) == 1)
            others = [asyncio.create_task(ask(session, f"harmless {number}", max_tokens=15)) for number in range(4)]
            await until(lambda: len(one.engine.attempts) + len(other.engine.attempts) == 6)
            assert not any(task.done() for task in suspects)
            for worker in (one, other):
                worker.runner.step_s = 0
            answers = await asyncio.gather(*suspects, *others)
            assert [status for status, *_ in answers] == [200] * 7
            assert quarantine_of(bare_gateway).is_empty


async def test_only_the_one_that_comes_again_alone_is_refused(bare_gateway, workers):
    """Three began together; two of them are sent again, one after the other. The innocent one is answered."""
    async with bare_gateway.session() as session:
        await crash_under(bare_gateway, workers, session, "innocent", "deadly", "gone")
        assert await crash_under(bare_gateway, workers, session, "deadly") == [(500, "request_quarantined", "false")]
        async with workers.one():
            await bare_gateway.workers(1)
            assert (await ask(session, "innocent"))[0] == 200
            assert (await ask(session, "deadly"))[:2] == (500, "request_quarantined")


async def test_a_link_that_ended_while_its_worker_lives_counts_for_nothing(bare_gateway, workers):
    async with bare_gateway.session() as session:
        await crash_under(bare_gateway, workers, session, "deadly")
        async with workers.one() as worker:
            await bare_gateway.workers(1)
            worker.runner.hang()
            asked = asyncio.create_task(ask(session))
            await until(lambda: len(worker.engine.attempts) == 1)
            [link] = bare_gateway.app[GENERATION].fleet.links
            link.abort()
            assert (await asked)[:2] == (503, "upstream_lost")
            worker.runner.release()
            await until(lambda: bare_gateway.app[GENERATION].fleet.links not in ([], [link]))
            assert quarantine_of(bare_gateway).counts() == (1, 0)
            assert (await ask(session))[0] == 200
        assert quarantine_of(bare_gateway).is_empty


async def test_a_request_that_hangs_an_engine_is_a_suspect_although_the_worker_is_linked_again(
    bare_gateway, workers, monkeypatch
):
    monkeypatch.setattr("gateway.routing.links.worker_link.STUCK_STEP_AGE_MS", 1_000)
    monkeypatch.setattr("gateway.routing.links.worker_link.SUSPECT_STEP_AGE_MS", 500)
    fleet = bare_gateway.app[GENERATION].fleet
    async with bare_gateway.session() as session:
        async with workers.one() as worker:
            await bare_gateway.workers(1)
            worker.runner.hang()
            assert (await ask(session))[:2] == (503, "upstream_lost")
            await until(lambda: fleet.num_lost >= 3)  # it is linked, and cut again
            assert quarantine_of(bare_gateway).counts() == (1, 0)
            worker.crash()
        await bare_gateway.workers(0)
        assert await crash_under(bare_gateway, workers, session, "deadly") == [(500, "request_quarantined", "false")]
