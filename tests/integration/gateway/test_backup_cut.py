"""A backup beside requests: whatever happens between the copies of its parts, the restored books are clean."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fakes import ROOT, generate_request
from two_journals import NO_REDIS, NUM_TOKENS, PROMPT, Scene, made_tenant, run, running_scene

from accounting.database import copies
from accounting.database.db import Database
from accounting.requests import request_postings
from gateway.base.home import Home
from gateway.cli import backup, home_archive
from gateway.metering.replay import replay
from workers.engine.journal.journal import EngineJournal


@pytest.fixture
async def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    for name in ("HEADGATE_STATE_DIR", "HEADGATE_DATABASE_URL", "HEADGATE_REDIS_URL"):
        monkeypatch.delenv(name, raising=False)
    home = Home(tmp_path / "home")
    home.prepare()
    owner = await made_tenant(home.database_url)
    async with running_scene(home, home.database_url, owner) as made:
        yield made


async def restored(scene: Scene, tmp_path: Path) -> Home:
    """Takes a backup and restores it, which verifies the books."""
    await run(backup.backup, tmp_path / "b.tar", "--home", scene.home.root)
    await run(backup.restore, tmp_path / "b.tar", "--home", tmp_path / "second")
    return Home(tmp_path / "second")


async def endings_and_records(home: Home) -> tuple[dict[str, str], set[str]]:
    """Starts as after a power loss: the gateway's journal is replayed, the worker's opened. Returns the kind of each
    ending, and the requests with an engine record; the books are clean.
    """
    database = Database(home.database_url)
    await replay(database, NO_REDIS, 0, home.state / "gateway-0" / "journal")
    journal = EngineJournal(home.state / "worker-0" / "journal", "worker-0", "p", ROOT, ballast_bytes=4096)
    assert journal.unacked == []  # all of it is in SQL
    journal.close()
    assert await asyncio.to_thread(backup._verify, home, home.database_url) == 0
    names = [f"req_{number}" for number in range(4)]
    async with database.read() as conn:
        kinds = {name: row["kind"] for name, row in (await request_postings.endings(conn, names)).items()}
        counted = {name for name, _ in await request_postings._records_of(conn, names)}
    await database.close()
    return kinds, counted


def after_the_database(monkeypatch: pytest.MonkeyPatch, what: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Lets something happen once the database is copied, before the journals are read."""
    loop, take = asyncio.get_running_loop(), copies.take

    def taken(*arguments: Any) -> None:
        take(*arguments)
        asyncio.run_coroutine_threadsafe(what(), loop).result()

    monkeypatch.setattr(copies, "take", taken)


@pytest.fixture
def another_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on another file system than the test's own."""
    here = tmp_path.stat().st_dev
    found = next(
        (one for one in ("/var/tmp", "/dev/shm", "/tmp") if Path(one).is_dir() and os.stat(one).st_dev != here), None
    )
    if found is None:
        pytest.skip("this machine has one file system")
    with tempfile.TemporaryDirectory(dir=found) as folder:
        yield Path(folder)


async def test_a_home_with_relative_links_is_restored_with_its_state_on_another_disk(
    scene, tmp_path, another_disk, monkeypatch
):
    """The backup linked the link, which led nowhere. The restore filled the database and then could not move the state."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "headgate.toml").write_text("# empty\n")
    (scene.home.root / "headgate.toml").symlink_to("../conf/headgate.toml")
    await scene.request("req_0")
    await run(backup.backup, tmp_path / "b.tar", "--home", scene.home.root)
    monkeypatch.setenv("HEADGATE_STATE_DIR", str(another_disk / "state"))
    await run(backup.restore, tmp_path / "b.tar", "--home", tmp_path / "second")
    home = Home(tmp_path / "second")
    assert (home.root / "headgate.toml").read_text() == "# empty\n"
    assert home.state == another_disk / "state"
    assert await endings_and_records(home) == ({"req_0": "settle"}, {"req_0"})


async def test_a_record_that_was_still_with_the_worker_is_in_the_restored_books(scene, tmp_path):
    await scene.request("req_0")
    await scene.post_endings()
    home = await restored(scene, tmp_path)
    assert await endings_and_records(home) == ({"req_0": "settle"}, {"req_0"})


async def test_a_record_that_is_acknowledged_after_the_database_was_copied_is_not_lost(scene, tmp_path, monkeypatch):
    """The worker's journal says that SQL has it. The copy of SQL does not."""
    await scene.request("req_0")
    await scene.post_endings()
    after_the_database(monkeypatch, scene.post_records)
    home = await restored(scene, tmp_path)
    assert await endings_and_records(home) == ({"req_0": "settle"}, {"req_0"})


async def test_a_request_that_ends_while_the_backup_is_taken_is_whole_in_it(scene, tmp_path, monkeypatch):
    async def meanwhile() -> None:
        await scene.request("req_1")
        await scene.post_endings()
        await scene.post_records()

    after_the_database(monkeypatch, meanwhile)
    home = await restored(scene, tmp_path)
    assert await endings_and_records(home) == ({"req_1": "settle"}, {"req_1"})


async def test_a_request_that_runs_while_the_backup_is_taken_is_void_and_written_off(scene, tmp_path):
    await scene.begin("req_2", num_tokens=30)
    for _ in range(5):
        scene.drive.step()
    home = await restored(scene, tmp_path)
    assert await endings_and_records(home) == ({"req_2": "void"}, {"req_2"})
    scene.drive.run()


async def test_a_request_that_begins_after_the_gateways_journal_was_read_is_not_in_the_backup(
    scene, tmp_path, monkeypatch
):
    loop, find = asyncio.get_running_loop(), home_archive._journal
    worker = scene.engine_journal.directory
    looks = []

    def found(directory: Path) -> list[Path]:
        looks.append(directory)
        if directory == worker and looks.count(worker) == 2:  # the second note, after the gateway's journal
            asyncio.run_coroutine_threadsafe(scene.request("req_3"), loop).result()
        return find(directory)

    monkeypatch.setattr(home_archive, "_journal", found)
    await scene.request("req_0")
    home = await restored(scene, tmp_path)
    assert await endings_and_records(home) == ({"req_0": "settle"}, {"req_0"})


async def test_records_of_a_gateway_whose_journal_is_on_another_host_are_kept(scene, tmp_path):
    """SQL names its slot. The request may have ended there."""
    async with scene.database.write() as conn:
        await request_postings.post(conn, 7, 1, [])
    scene.drive.send(generate_request("req_3", PROMPT, NUM_TOKENS))
    scene.drive.run()
    await run(backup.backup, tmp_path / "b.tar", "--home", scene.home.root)
    await asyncio.to_thread(
        CliRunner().invoke, backup.restore, [str(tmp_path / "b.tar"), "--home", str(tmp_path / "second")]
    )
    database = Database(Home(tmp_path / "second").database_url)
    async with database.read() as conn:
        assert [one.request_id for one in await request_postings.unended(conn)] == ["req_3"]
    await database.close()


SLOW = """
import sys, time
from accounting.database import copies

def take(url, path, told):
    path.write_bytes(b"half of the database")
    print("copying", flush=True)
    time.sleep(30)

copies.take = take
from gateway.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
async def test_a_backup_that_is_ended_leaves_nothing_behind(
    scene: Scene, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    """SIGTERM left the links to the journals in the home and a copy of the database beside the backup."""
    words = ["backup", str(tmp_path / "out" / "b.tar"), "--home", str(scene.home.root)]
    (tmp_path / "out").mkdir()
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", SLOW, *words, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"copying\n"
    assert list(scene.home.root.glob(".backup-*"))
    process.send_signal(number)
    assert await process.wait() == status
    assert not list(scene.home.root.glob(".backup-*"))
    assert not list((tmp_path / "out").iterdir())
