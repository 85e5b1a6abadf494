"""A host that shares its database with others: it draws no secrets of its own, and the journals of its backup are put
back alone, beside that database."""

from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from two_journals import NO_REDIS, made_tenant, run, running_scene

from accounting.database import copies
from accounting.database.db import Database
from accounting.tables.models import LedgerEntry
from gateway.base.home import Home
from gateway.cli.main import main

WORDS = ("slot", "voided", "shipped", "brought_back", "left_out")


@pytest.fixture(autouse=True)
def alone(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if copies.dialect_of(database_url) == "postgresql" and shutil.which("pg_dump") is None:
        pytest.skip("pg_dump is not on PATH")
    monkeypatch.delenv("HEADGATE_STATE_DIR", raising=False)
    monkeypatch.setenv("HEADGATE_REDIS_URL", NO_REDIS)
    monkeypatch.setenv("HEADGATE_DATABASE_URL", database_url)
    monkeypatch.setattr("gateway.books.verification.RECORD_LATE_MS", 0)


def made_home(root: Path) -> Home:
    home = Home(root)
    home.prepare()
    return home


def files(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


async def replayed(home: Home) -> list[tuple[Any, ...]]:
    done = await run(main, "journals", "replay", "--json", "--home", home.root)
    return [tuple(one[word] for word in WORDS) for one in json.loads(done.stdout)]


async def verified(home: Home) -> None:
    await run(main, "verify-books", "--home", home.root)


async def test_a_further_host_draws_no_secrets_for_a_database_in_use(database_url, tmp_path):
    """Every API key would be refused there, and what it encrypts could not be read by the others."""
    await run(main, "migrate", "--home", tmp_path / "first")
    await run(main, "migrate", "--home", tmp_path / "also before the first key")
    assert len(files(tmp_path / "first" / "secrets")) == 2
    await made_tenant(database_url)
    await run(main, "migrate", "--home", tmp_path / "first")
    there = tmp_path / "there"
    for command in (("migrate",), ("up", "--port", "0")):
        said = (await run(main, *command, "--home", there, expect=1)).output
        assert "copy secrets/ from another host or the backup" in said
        assert not there.exists()
    shutil.copytree(tmp_path / "first" / "secrets", there / "secrets")
    await run(main, "migrate", "--home", there)


async def test_journals_are_put_back_beside_a_database_that_is_used(database_url, tmp_path):
    home, there = made_home(tmp_path / "home"), Home(tmp_path / "there")
    file, owner = tmp_path / "b.tar", await made_tenant(database_url)
    async with running_scene(home, database_url, owner, slot=1) as scene:
        await scene.request("req_1")
        await scene.begin("req_2", num_tokens=30)
        for _ in range(5):
            scene.drive.step()
        await run(main, "backup", file, "--home", home.root)
    refused = (await run(main, "restore", file, "--home", there.root, expect=1)).output
    assert "nothing is overwritten" in refused

    said = (await run(main, "restore", file, "--journals", "--home", there.root)).output
    assert "gateway-1, worker-1" in said
    assert {path.name for path in there.root.iterdir()} == {"state"}, "no secrets are drawn, no database is made"
    assert {path.name for path in there.state.iterdir()} == {"gateway-1", "worker-1"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (there.root, there.state)} == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in there.root.rglob("*") if path.is_file()} == {0o600}
    assert await replayed(there) == [("gateway-1", 1, 1, 0, 0), ("worker-1", 0, 0, 2, 0)]
    await verified(there)


async def test_a_slot_that_is_here_is_never_overwritten(database_url, tmp_path):
    home, file = made_home(tmp_path / "home"), tmp_path / "b.tar"
    async with running_scene(home, database_url, await made_tenant(database_url)) as scene:
        await scene.request("req_1")
        await run(main, "backup", file, "--home", home.root)
        await scene.request("req_2")
    shutil.rmtree(home.state / "gateway-0")
    before = files(home.root)
    said = (await run(main, "restore", file, "--journals", "--home", home.root, expect=1)).output
    assert "The slot worker-0 has a folder already" in said
    assert files(home.root) == before


async def test_a_damaged_backup_puts_no_journal_back(database_url, tmp_path):
    home, file = made_home(tmp_path / "home"), tmp_path / "b.tar"
    async with running_scene(home, database_url, await made_tenant(database_url)) as scene:
        await scene.request("req_1")
        await run(main, "backup", file, "--home", home.root)
    secret = (home.root / "secrets" / "pepper").read_bytes()
    file.write_bytes(file.read_bytes().replace(secret, bytes(len(secret))))
    said = (await run(main, "restore", file, "--journals", "--home", tmp_path / "there", expect=1)).output
    assert "secrets/pepper" in said
    assert files(tmp_path / "there") == {}


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("newest", [0, 1])
async def test_all_hosts_and_the_database_are_restored_from_the_newest_backup_and_the_others_journals(
    database_url, tmp_path, monkeypatch, newest
):
    """Whichever host's is the newest: the journals of the other one end before what the database knows of it."""
    homes = [made_home(tmp_path / f"host-{slot}") for slot in (0, 1)]
    owner = await made_tenant(database_url)
    async with (
        running_scene(homes[newest], database_url, owner, slot=newest) as one,
        running_scene(homes[1 - newest], database_url, owner, slot=1 - newest) as other,
    ):
        await other.request("req_0")
        await run(main, "backup", tmp_path / "older.tar", "--home", other.home.root)
        await other.request("req_1")
        await other.post_endings()
        await other.post_records()
        await one.request("req_2")
        await run(main, "backup", tmp_path / "newest.tar", "--home", one.home.root)
    url = f"sqlite+aiosqlite:///{tmp_path / 'new.db'}"
    monkeypatch.setenv("HEADGATE_DATABASE_URL", url)
    home = Home(tmp_path / "restored")
    await run(main, "restore", tmp_path / "newest.tar", "--home", home.root)
    await run(main, "restore", tmp_path / "older.tar", "--journals", "--home", home.root)
    assert sum(shipped for _, _, shipped, _, _ in await replayed(home)) == 1
    await verified(home)
    for slot in (0, 1):
        async with running_scene(home, url, owner, slot=slot) as scene:
            await scene.request(f"req_{3 + slot}")
            await scene.post_endings()
            await scene.post_records()
    await verified(home)
    assert await requests(url) == [f"req_{number}" for number in range(5)]


async def requests(url: str) -> list[str]:
    database = Database(url)
    async with database.read() as conn:
        found = await conn.scalars(select(LedgerEntry.request_id).order_by(LedgerEntry.request_id))
    await database.close()
    return list(found)
