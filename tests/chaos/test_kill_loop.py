"""kill -9 of gateways, their posters, workers, Redis and database connections at random points under load of every
kind: no token is lost, none charged twice, and every client's receipt agrees with the ledger.

`HEADGATE_CHAOS_SEED` repeats a run; the seed is printed and part of every failure.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from fakes import MODEL
from fleet import Fleet, fleet
from kill_loop import Kill, Victim, execute, schedule
from receipts import Clients, Receipt
from sqlalchemy import create_engine, text

NUM_CLIENTS = 8
PROGRESS_S = 60.0
"""Between two kills the load must get answers within this."""
WITH_SQLITE: Sequence[Victim] = ("gateway", "worker", "redis")
EVERYBODY: Sequence[Victim] = (*WITH_SQLITE, "poster", "database")


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
@pytest.mark.timeout(300)
async def test_ten_kills_under_load_lose_and_double_nothing(tmp_path, database_url):
    await soaked(tmp_path, database_url, EVERYBODY, num_kills=10, num_lines=20)


@pytest.mark.slow
@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
@pytest.mark.timeout(3600)
async def test_two_hundred_kills_under_load_lose_and_double_nothing(tmp_path, database_url):
    await soaked(tmp_path, database_url, EVERYBODY, num_kills=200, num_lines=400)


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_fifty_kills_under_load_lose_and_double_nothing_on_sqlite(tmp_path, sqlite_url):
    await soaked(tmp_path, sqlite_url, WITH_SQLITE, num_kills=50, num_lines=100)


async def soaked(
    tmp_path: Path, database_url: str, victims: Sequence[Victim], *, num_kills: int, num_lines: int
) -> None:
    seed = int(os.environ.get("HEADGATE_CHAOS_SEED") or random.randrange(10**6))
    began = time.monotonic()
    try:
        async with fleet(tmp_path / "home", database_url) as running:
            run = await Run.of(running, seed, num_lines)
            await run.through(schedule(seed, num_kills, victims))
            await running.verified(90)
            run.compare(Books(database_url.replace("+aiosqlite", "")))
            print(run.summary)
    except BaseException as failure:
        failure.add_note(f"HEADGATE_CHAOS_SEED={seed}")
        raise
    finally:
        print(f"seed {seed}, {num_kills} kills, {time.monotonic() - began:.0f} s")


class Run:
    def __init__(
        self, running: Fleet, clients: Clients, keyed_tenant: str, batch: tuple[str, str], num_lines: int
    ) -> None:
        self.clients = clients
        self.killed: Counter[str] = Counter()
        self._fleet = running
        self._keyed_tenant = keyed_tenant
        self._batch_tenant, self._batch_key = batch
        self._batch_tokens = self._num_completed = 0
        self._num_lines = num_lines

    @classmethod
    async def of(cls, running: Fleet, seed: int, num_lines: int) -> Run:
        _, api_key = await running.tenant_key("plain")
        keyed_tenant, keyed = await running.tenant_key("keyed")
        clients = Clients(running.base_url, api_key, MODEL, seed, keyed)
        return cls(running, clients, keyed_tenant, await running.tenant_key("batch"), num_lines)

    async def through(self, kills: Sequence[Kill]) -> None:
        async with openai.AsyncOpenAI(
            base_url=self._fleet.base_url + "/v1", api_key=self._batch_key, max_retries=12, timeout=30
        ) as client:
            batch = await self._submit(client)
            load = asyncio.create_task(self.clients.run(NUM_CLIENTS))
            try:
                for kill in kills:
                    await self._under_load(kill.after_answers, load)
                    await asyncio.sleep(kill.after_s)
                    self.killed[kill.victim] += await asyncio.to_thread(execute, kill, self._fleet)
                await self._under_load(NUM_CLIENTS, load)
            finally:
                self.clients.stop()
                await load
            await self._finished(client, batch)

    async def _under_load(self, num_answers: int, load: asyncio.Task[None]) -> None:
        wanted = self.clients.num_answered + num_answers
        deadline = time.monotonic() + PROGRESS_S
        while self.clients.num_answered < wanted:
            if load.done():
                load.result()
            assert time.monotonic() < deadline, "the load gets no answers any more"
            await asyncio.sleep(0.02)

    async def _submit(self, client: openai.AsyncOpenAI) -> str:
        lines = [
            {
                "custom_id": f"line-{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {
                    "model": MODEL,
                    "max_tokens": 24,
                    "ignore_eos": True,
                    "messages": [{"role": "user", "content": f"What is module {number}?"}],
                },
            }
            for number in range(self._num_lines)
        ]
        content = "\n".join(json.dumps(line) for line in lines).encode()
        file = await client.files.create(file=("work.jsonl", io.BytesIO(content)), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        return batch.id

    async def _finished(self, client: openai.AsyncOpenAI, batch_id: str) -> None:
        deadline = time.monotonic() + 300
        while (batch := await client.batches.retrieve(batch_id)).status != "completed":
            assert time.monotonic() < deadline, batch
            await asyncio.sleep(0.5)
        assert batch.request_counts is not None
        counts = batch.request_counts
        self._num_completed = counts.completed  # a line that three kills hit is an error line
        assert counts.completed + counts.failed == self._num_lines == counts.total, batch
        self._batch_tokens = batch.usage.total_tokens

    def compare(self, books: Books) -> None:
        for receipt in [*self.clients.receipts, *self.clients.keyed.values()]:
            assert not (wrong := disagreement(receipt, books)), (wrong, receipt)
        ran = {receipt.request_id for receipt in self.clients.keyed.values()}
        assert books.settled_of(self._keyed_tenant) == ran, "a key is charged once, when it is answered"
        assert len(ran) == len(self.clients.keyed)
        lines = books.lines_of(self._batch_tenant)
        assert len(lines) == self._num_completed, "a line of the output is charged once, others never"
        assert sum(lines.values()) == self._batch_tokens

    @property
    def summary(self) -> dict[str, Any]:
        ends = Counter(receipt.end for receipt in self.clients.receipts)
        errors = Counter(r.code for r in self.clients.receipts if r.end == "error")
        return {
            "killed": dict(self.killed),
            "ends": dict(ends),
            "errors": dict(errors),
            "keys": len(self.clients.keyed),
            "lines": self._num_lines,
        }


class Books:
    """The endings in the ledger, by request."""

    def __init__(self, url: str) -> None:
        engine = create_engine(url)
        with engine.connect() as conn:
            rows = conn.execute(text("SELECT * FROM ledger_entry WHERE kind IN ('settle', 'void')")).mappings()
            self.endings: dict[str, list[dict[str, Any]]] = {}
            for row in rows:
                self.endings.setdefault(row["request_id"], []).append(dict(row))
        engine.dispose()

    def settled(self, request_id: str) -> list[dict[str, Any]]:
        return [row for row in self.endings.get(request_id, ()) if row["kind"] == "settle"]

    def settled_of(self, tenant_id: str) -> set[str]:
        return {row["request_id"] for row in self._settles() if row["tenant_id"] == tenant_id}

    def lines_of(self, tenant_id: str) -> dict[int, int]:
        """Tokens charged by line; a line that is charged twice is missing."""
        rows = [row for row in self._settles() if row["tenant_id"] == tenant_id]
        counts = Counter(row["line_no"] for row in rows)
        return {row["line_no"]: _tokens(row) for row in rows if counts[row["line_no"]] == 1}

    def _settles(self) -> list[dict[str, Any]]:
        return [row for rows in self.endings.values() for row in rows if row["kind"] == "settle"]


def disagreement(receipt: Receipt, books: Books) -> str:
    """What is wrong between what a client was told and what it pays; empty: nothing."""
    settled = books.settled(receipt.request_id)
    if receipt.end == "error":
        return "our error is free" if any(_tokens(row) for row in settled) else ""
    if receipt.end == "cut":
        short = [row for row in settled if row["output"] < receipt.num_pieces]
        return "more was received than is billed" if short else ""
    if len(settled) != 1:
        return f"a finished request has {len(settled)} settles"
    (row,), usage = settled, receipt.usage
    if usage is None:
        return "a finished request was told no usage"
    told = (usage["prompt_tokens"], usage["completion_tokens"], usage["prompt_tokens_details"]["cached_tokens"])
    booked = (row["cache_read"] + row["cache_write"] + row["uncached"], row["output"], row["cache_read"])
    return "" if told == booked else f"told {told}, booked {booked}"


def _tokens(row: dict[str, Any]) -> int:
    return int(row["cache_read"] + row["cache_write"] + row["uncached"] + row["output"])
