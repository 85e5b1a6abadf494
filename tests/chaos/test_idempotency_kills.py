"""kill -9 of a gateway at each step of a request with a key: the key's next request is answered, and paid once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from byte_model import write_byte_model
from fakes import ScriptedWorker
from gateways import MODEL, prepare_home, running_gateway
from load import stretched
from sqlalchemy import text

from accounting.books import books
from accounting.database.db import Database

CHAT = "/v1/chat/completions"
KEY = {"idempotency-key": "mine"}
STARTED = """
import functools, importlib, inspect, os, runpy, signal

def arm(place):
    # `before` or `after`, then module:name, or module:class:name: a coroutine function, or, for `before`, any other.
    when, module, *names = place.split(":")
    owner = functools.reduce(getattr, names[:-1], importlib.import_module(module))
    real = getattr(owner, names[-1])

    def killed(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    async def dying(*args, **kwargs):
        if when == "after":
            await real(*args, **kwargs)
        killed()

    setattr(owner, names[-1], dying if inspect.iscoroutinefunction(real) else killed)

if place := os.environ.get("DIE_AT"):
    arm(place)
runpy.run_module("gateway", run_name="__main__")
"""
NOT_STORED = {
    "before the claim": "before:accounting.requests.idempotency_store:take",
    "before the claim's commit": "after:accounting.requests.idempotency_store:take",
    "behind the claim": "after:gateway.idempotency.idempotency:_claim",
    "before OPEN": "before:gateway.journal.journal:Journal:open",
    "behind OPEN": "after:gateway.journal.journal:Journal:open",
    "before the answer is stored": "before:accounting.requests.idempotency_store:store",
    "before the answer's commit": "after:accounting.requests.idempotency_store:store",
}
STORED = {
    "behind the stored answer": "after:gateway.idempotency.claimed_key:ClaimedKey:store",
    "before SETTLE": "before:gateway.journal.journal:Journal:begin_end",
    "behind SETTLE": "before:gateway.metering.endings:Endings:_give_back",
    "before the ledger's commit": "after:accounting.requests.request_postings:post",
    "behind the ledger's commit": "after:gateway.journal.poster:Poster:_post",
}


def places(named: dict[str, str]) -> list[Any]:
    return [pytest.param(place, id=name) for name, place in named.items()]


class Slot:
    """Gateway slot 0 as a process; its listener stays open over its deaths."""

    def __init__(self, home: Path, redis_url: str, api_key: str) -> None:
        self.home = home
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.set_inheritable(True)
        self._url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._api_key = api_key
        self._environ = {n: v for n, v in os.environ.items() if not n.startswith("HEADGATE_")} | {
            "HEADGATE_HOME": str(home),
            "HEADGATE_SLOT": "0",
            "HEADGATE_REDIS_URL": redis_url,
            "HEADGATE_LISTEN_FD": str(self._listener.fileno()),
            "HEADGATE_MODELS": json.dumps({MODEL: {"path": str(write_byte_model(home / "model"))}}),
        }
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, die_at: str = "") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", STARTED],
            env=self._environ | {"DIE_AT": die_at},
            pass_fds=[self._listener.fileno()],
            stderr=subprocess.DEVNULL,
        )

    async def ask(self, body: dict[str, Any]) -> tuple[int, bytes, bool]:
        """(status, body, replayed)"""
        headers = {"authorization": f"Bearer {self._api_key}", **KEY}
        timeout = aiohttp.ClientTimeout(stretched(30))
        async with (
            aiohttp.ClientSession(self._url, headers=headers, timeout=timeout) as session,
            session.post(CHAT, json=body) as answer,
        ):
            return answer.status, await answer.read(), "idempotent-replayed" in answer.headers

    async def until_answered(self, body: dict[str, Any]) -> tuple[bytes, bool]:
        deadline = time.monotonic() + stretched(40)
        while time.monotonic() < deadline:
            status, answer, replayed = await self.ask(body)
            if status == 200:
                return answer, replayed
            assert status in {409, 503}, answer  # no worker yet, or the key runs
            await asyncio.sleep(0.1)
        raise AssertionError(answer)

    async def until_killed(self) -> None:
        assert self.process is not None
        assert await asyncio.to_thread(self.process.wait, stretched(40)) == -signal.SIGKILL

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)
        self._listener.close()


@asynccontextmanager
async def killed_slot(tmp_path: Path, redis_url: str, die_at: str, body: dict[str, Any]) -> AsyncIterator[Slot]:
    """A slot that has just died over the first request with the key."""
    home = tmp_path / "home"
    keys = await prepare_home(home, f"sqlite+aiosqlite:///{home / 'headgate.db'}")
    slot = Slot(home, redis_url, keys.api_key)
    try:
        async with ScriptedWorker(tmp_path / "w0.sock", redis_url=redis_url, journal_dir=tmp_path / "w0"):
            slot.start(die_at)
            try:
                await slot.until_answered(body)
            except aiohttp.ClientError:
                pass
            await slot.until_killed()
            yield slot
    finally:
        slot.close()


def chat(stream: bool) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 12, "stream": stream}


async def verified(home: Path) -> list[tuple[str, str]]:
    """Endings in order of their requests, once the books balance."""
    database = Database(f"sqlite+aiosqlite:///{home / 'headgate.db'}")
    deadline = time.monotonic() + stretched(20)
    try:
        while True:
            async with database.read() as conn:
                report = await books.verify(conn)
                rows = await conn.execute(
                    text("SELECT kind, outcome FROM ledger_entry WHERE kind IN ('settle', 'void') ORDER BY request_id")
                )
                endings = [(row.kind, row.outcome) for row in rows]
            if report.ok and ("settle", "ok") in endings:
                return endings
            assert time.monotonic() < deadline, report
            await asyncio.sleep(0.1)
    finally:
        await database.close()


@pytest.mark.parametrize("place", places(NOT_STORED))
async def test_killed_before_the_answer_was_stored_the_key_runs_again(
    tmp_path: Path, redis_url: str, place: str
) -> None:
    body = chat(stream="ledger" in place or "commit" in place)
    async with killed_slot(tmp_path, redis_url, place, body) as slot:
        slot.start()
        answer, replayed = await slot.until_answered(body)
        assert not replayed
        assert await slot.until_answered(body) == (answer, True)
        *before, last = await verified(slot.home)
        assert last == ("settle", "ok")
        assert set(before) <= {("void", "gateway_crash"), ("void", "internal")}


@pytest.mark.parametrize("place", places(STORED))
async def test_killed_behind_the_stored_answer_it_is_replayed_and_paid_once(
    tmp_path: Path, redis_url: str, place: str
) -> None:
    stream = "Journal" in place
    body = chat(stream)
    async with killed_slot(tmp_path, redis_url, place, body) as slot:
        slot.start()
        answer, replayed = await slot.until_answered(body)
        assert replayed
        if stream:
            assert answer.endswith(b"data: [DONE]\n\n")
        assert await verified(slot.home) == [("settle", "ok")]


@pytest.mark.slow
@pytest.mark.parametrize("place", places(STORED))
async def test_another_gateway_settles_what_the_dead_one_stored(tmp_path: Path, redis_url: str, place: str) -> None:
    """The key's next request comes before the journal is replayed; the replay then changes nothing."""
    body = chat(stream=False)
    async with (
        killed_slot(tmp_path, redis_url, place, body) as slot,
        running_gateway(slot.home, redis_url, slot=1) as other,
    ):
        await other.workers(1)
        async with other.session() as session, session.post(CHAT, json=body, headers=KEY) as answer:
            assert answer.headers["idempotent-replayed"] == "true"
        assert await verified(slot.home) == [("settle", "ok")]
        slot.start()
        assert (await slot.until_answered(body))[1]
        assert await verified(slot.home) == [("settle", "ok")]


async def test_while_the_journal_of_a_dead_gateway_is_not_replayed_its_key_is_taken(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.idempotency.waits.MOST_S", 1.0)
    body = chat(stream=False)
    async with (
        killed_slot(tmp_path, redis_url, NOT_STORED["behind OPEN"], body) as slot,
        running_gateway(slot.home, redis_url, slot=1) as other,
    ):
        await other.workers(1)
        async with other.session() as session, session.post(CHAT, json=body, headers=KEY) as answer:
            assert answer.status == 409
        slot.start()
        await slot.until_answered(body)
        assert await verified(slot.home) == [("void", "gateway_crash"), ("settle", "ok")]
