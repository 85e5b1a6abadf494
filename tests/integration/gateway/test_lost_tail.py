"""SQL fails over to a replica that was behind. The journals of this machine bring back what it lost, and do it once."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner
from fakes import generate_request
from sqlalchemy import select
from two_journals import NO_REDIS, NUM_TOKENS, PROMPT, Scene, made_tenant, run, running_scene

from accounting.database import copies
from accounting.database.db import Database
from accounting.tables.models import EngineRecordRow, LedgerEntry
from gateway.base.home import Home
from gateway.cli.main import main

NOTHING = {"owned": False, "voided": 0, "shipped": 0, "brought_back": 0, "left_out": 0}


class Cluster:
    """A database, and later the replica that takes its place."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self._replica = folder / "replica.db"
        self._name = ""

    def replicate(self) -> None:
        """Makes a replica, which is not told of what follows. Nobody may use the database meanwhile."""
        if copies.dialect_of(self.url) == "sqlite":
            copies.take(self.url, self._replica)
            return
        self._name = f"hg_test_{uuid.uuid4().hex[:12]}"
        self._administer(f'CREATE DATABASE "{self._name}" TEMPLATE "{self.url.rpartition("/")[2]}"')

    def fail_over(self) -> None:
        name = f"/{self._name}" if self._name else f"/{self._replica}"
        base = self.url.rpartition("/")[0] if self._name else "sqlite+aiosqlite://"
        self.url = base + name

    def drop(self) -> None:
        if self._name:
            self._administer(f'DROP DATABASE "{self._name}" WITH (FORCE)')

    def _administer(self, statement: str) -> None:
        base = self.url.rpartition("/")[0].replace("postgresql+psycopg", "postgresql")
        with psycopg.connect(f"{base}/postgres", autocommit=True) as connection:
            connection.execute(statement)


@pytest.fixture
def cluster(database_url: str, tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(database_url, tmp_path)
    yield made
    made.drop()


@pytest.fixture
async def home(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Home]:
    monkeypatch.delenv("HEADGATE_STATE_DIR", raising=False)
    monkeypatch.setenv("HEADGATE_REDIS_URL", NO_REDIS)
    place = Home(tmp_path / "home")
    place.prepare()
    return place


async def headgate(cluster: Cluster, home: Home, *words: str, expect: int = 0) -> Any:
    env = {"HEADGATE_DATABASE_URL": cluster.url}
    command = [*words, "--json", "--home", str(home.root)]
    done = await asyncio.to_thread(CliRunner().invoke, main, command, env=env)
    assert done.exit_code == expect, done.output
    return json.loads(done.stdout)


async def broken(cluster: Cluster, home: Home) -> set[str]:
    """The equations that do not hold. The engine's records are no longer awaited."""
    env = {"HEADGATE_DATABASE_URL": cluster.url}
    command = ["verify-books", "--json", "--home", str(home.root)]
    done = await asyncio.to_thread(CliRunner().invoke, main, command, env=env)
    return {one["id"] for one in json.loads(done.stdout)["equations"] if not one["ok"]}


async def rows(url: str) -> tuple[set[tuple[Any, ...]], set[tuple[Any, ...]]]:
    """What the books say of requests, but for the moments of posting."""
    database = Database(url)
    entry, record = LedgerEntry, EngineRecordRow
    async with database.read() as conn:
        entries = await conn.execute(
            select(entry.request_id, entry.kind, entry.attempt, entry.charge, entry.uncached, entry.output)
        )
        records = await conn.execute(
            select(record.request_id, record.attempt, record.worker, record.uncached, record.output, record.reason)
        )
        found = {tuple(row) for row in entries}, {tuple(row) for row in records}
    await database.close()
    return found


@pytest.fixture
async def lost(cluster: Cluster, home: Home, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A charge and a void with a write-off, all of it acknowledged by SQL before it lost them, and a charge before."""
    monkeypatch.setattr("gateway.books.verification.RECORD_LATE_MS", 0)
    owner = await made_tenant(cluster.url)
    async with running_scene(home, cluster.url, owner) as scene:
        await scene.request("req_0")
        await scene.post_endings()
        await scene.post_records()
    cluster.replicate()
    return owner


async def tail(scene: Scene) -> None:
    await scene.request("req_1")
    await scene.request("req_2", kind="void", outcome="internal", write_off="internal")
    await scene.post_endings()
    await scene.post_records()


async def test_a_lost_tail_is_brought_back_from_the_journals_once(cluster, home, lost):
    async with running_scene(home, cluster.url, lost) as scene:
        await tail(scene)
    before = await rows(cluster.url)
    assert {entry[:2] for entry in before[0]} >= {("req_1", "settle"), ("req_2", "void"), ("req_2", "internal")}
    cluster.fail_over()
    await headgate(cluster, home, "journals", "replay", "0")
    assert await broken(cluster, home) == {"I1"}
    told = await headgate(cluster, home, "journals", "replay")
    assert told == [NOTHING | {"slot": "gateway-0"}, NOTHING | {"slot": "worker-0", "brought_back": 2}]
    assert await broken(cluster, home) == set()
    assert await rows(cluster.url) == before
    again = await headgate(cluster, home, "journals", "replay", "worker-0")
    assert again == [NOTHING | {"slot": "worker-0"}]
    assert await rows(cluster.url) == before


async def test_it_comes_back_while_gateway_and_worker_run(cluster, home, lost):
    """The gateway ships again by itself. The worker has forgotten what was acknowledged; its journal has not."""
    async with running_scene(home, cluster.url, lost) as scene:
        await tail(scene)
        await scene.begin("req_3", num_tokens=30)
        for _ in range(5):
            scene.drive.step()
        cluster.fail_over()
        await scene.database.close()
        scene.database = scene.poster._database = Database(cluster.url)
        await scene.request("req_4")
        await scene.post_endings()
        told = await headgate(cluster, home, "journals", "replay")
        assert told == [
            NOTHING | {"slot": "gateway-0", "owned": True},
            NOTHING | {"slot": "worker-0", "owned": True, "brought_back": 3},
        ]
        assert await broken(cluster, home) == set()
        assert {record[0] for record in (await rows(cluster.url))[1]} == {f"req_{n}" for n in (0, 1, 2, 4)}
        scene.drive.run()
        await scene.post_records()


async def test_what_a_killed_worker_left_is_brought_into_the_books_with_its_last_counts(cluster, home, lost):
    async with running_scene(home, cluster.url, lost) as scene:
        await scene.begin("req_1", num_tokens=30)
        for _ in range(5):
            scene.drive.step()
    [_, worker] = await headgate(cluster, home, "journals", "replay")
    assert worker == NOTHING | {"slot": "worker-0", "brought_back": 1}
    assert await broken(cluster, home) == set()
    [record] = [record for record in (await rows(cluster.url))[1] if record[0] == "req_1"]
    assert record[-1] == "worker_crash"


async def test_a_record_whose_request_nobody_knows_is_left_out_until_its_ending_is_here(cluster, home, lost, tmp_path):
    """Its gateway runs on another host, or was lost with its journal: a record alone could never be ended."""
    async with running_scene(home, cluster.url, lost) as scene:
        scene.drive.send(generate_request("req_3", PROMPT, NUM_TOKENS, tenant=lost["tenant_id"]))
        scene.drive.run()
    [worker] = await headgate(cluster, home, "journals", "replay", "worker-0")
    assert worker == NOTHING | {"slot": "worker-0", "left_out": 1}
    assert await broken(cluster, home) == set()
    there = Home(tmp_path / "there")
    async with running_scene(there, cluster.url, lost, slot=1) as other:
        await other.request("req_3", kind="void", outcome="internal", write_off="internal")
        await other.post_endings()
    [worker] = await headgate(cluster, home, "journals", "replay", "worker-0")
    assert worker == NOTHING | {"slot": "worker-0", "brought_back": 1}
    assert await broken(cluster, home) == set()


async def test_the_command_says_how_many_records_came_back_and_refuses_a_slot_that_is_not_here(
    cluster, home, lost, monkeypatch
):
    monkeypatch.setenv("HEADGATE_DATABASE_URL", cluster.url)
    async with running_scene(home, cluster.url, lost) as scene:
        scene.drive.send(generate_request("req_3", PROMPT, NUM_TOKENS, tenant=lost["tenant_id"]))
        scene.drive.run()
        await scene.request("req_1")
    said = (await run(main, "journals", "replay", "--home", home.root)).output
    assert "The journals of workers brought 1 engine record back into the books." in said
    assert "The command left 1 engine record out" in said
    assert "engine record" not in (await run(main, "journals", "replay", "0", "--home", home.root)).output
    said = (await run(main, "journals", "replay", "worker-7", "0", "--home", home.root, expect=2)).output
    assert "There is no journal here of: worker-7." in said
