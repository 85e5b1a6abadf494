"""O1: what `headgate up` looks at first, without a mount and without a second clock."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import pytest
import redis
from disks import CountedDisk

from accounting.database import migrate
from gateway.base.home import Home, HomeError
from gateway.base.settings import SettingsError
from gateway.cli import doctor_checks, start_checks
from gateway.cli.finding import Installation
from workers.process import file_systems
from workers.protocol.ballast import BALLAST_BYTES, Ballast

MIB = 1024 * 1024


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    return home


def test_o1_room_for_the_ballast_of_every_process_is_looked_for(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = CountedDisk(home, monkeypatch)
    journals = [home / "state" / name / "journal" for name in ("worker-0", "gateway-0")]
    disk.room = 2 * BALLAST_BYTES + start_checks.SPARE_BYTES
    start_checks.check_room(home, journals)
    disk.room -= 1
    with pytest.raises(HomeError, match=r"has 17 MiB free, and a start needs 18: .* Make room"):
        start_checks.check_room(home, journals)


def test_o1_ballast_that_is_there_already_needs_no_room(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = home / "journal"
    journal.mkdir()
    assert Ballast(journal).take()
    disk = CountedDisk(home, monkeypatch)
    disk.room = start_checks.SPARE_BYTES
    start_checks.check_room(home, [journal])


@pytest.mark.parametrize("on_nfs", ["home", "home/state"])
def test_a_network_file_system_is_refused_and_a_mount_for_files_alone_is_not(
    home: Path, monkeypatch: pytest.MonkeyPatch, on_nfs: str
) -> None:
    mounts = home.parent / "mounts"
    mounts.write_text(f"/dev/sda1 / ext4 rw 0 0\nserver:/x {home}/files nfs4 rw 0 0\n")
    monkeypatch.setattr(file_systems, "MOUNTS", mounts)
    journals = [home / "state" / "gateway-0" / "journal"]
    start_checks.check_file_system(home, journals)
    mounts.write_text(f"/dev/sda1 / ext4 rw 0 0\nserver:/x {home.parent / on_nfs} nfs4 rw 0 0\n")
    with pytest.raises(HomeError, match=r"is on nfs4, a network file system\. Use a local disk: "):
        start_checks.check_file_system(home, journals)


@pytest.mark.parametrize(("ahead_s", "words"), [(3600, "3600 s ahead of"), (-3600, "3600 s behind")])
async def test_o1_a_redis_with_another_time_is_refused_with_what_to_do(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, ahead_s: int, words: str
) -> None:
    await start_checks.check_redis(redis_url, is_ours=False)
    now = time.time
    monkeypatch.setattr(start_checks.time, "time", lambda: now() - ahead_s)
    with pytest.raises(HomeError, match=f"{words} this machine's: set both by NTP"):
        await start_checks.check_redis(redis_url, is_ours=False)


async def test_o1_a_redis_that_is_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://u:secret@127.0.0.1:{silent.getsockname()[1]}/0"
        with pytest.raises(HomeError, match="Redis does not answer") as refused:
            await start_checks.check_redis(url, is_ours=False)
    assert "secret" not in str(refused.value)
    assert "HEADGATE_REDIS_URL" in str(refused.value)


async def test_o1_a_redis_url_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(SettingsError, match="HEADGATE_REDIS_URL cannot be read"):
        await start_checks.check_redis("redis://h?db=x", is_ours=False)


async def test_o1_what_is_waited_for_is_said_again_and_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start_checks, "FIRST_WORD_S", 0.01)
    monkeypatch.setattr(start_checks, "NEXT_WORD_S", 0.01)
    said, waits = "", iter(["the gateways", *["a worker"] * 1000])
    async with asyncio.timeout(20), start_checks.told(lambda: next(waits)):
        while said.count("Waiting for a worker (") < 2:
            await asyncio.sleep(0.01)
            said += capsys.readouterr().err
    assert said.startswith("Waiting for the gateways (0 s).")


@pytest.mark.parametrize(("policy", "state"), [("noeviction", "ok"), ("allkeys-lru", "failing")])
def test_the_doctor_names_a_redis_that_may_drop_keys(own_redis, tmp_path: Path, policy: str, state: str) -> None:
    with redis.Redis.from_url(own_redis.url) as client:
        client.config_set("maxmemory-policy", policy)
    _, found = doctor_checks.redis(Installation(Home(tmp_path), {"HEADGATE_REDIS_URL": own_redis.url}))
    assert (found.state, policy in found.says) == (state, True)


def test_the_doctor_says_that_a_provider_hides_the_policy(own_redis, tmp_path: Path) -> None:
    with redis.Redis.from_url(own_redis.url) as client:
        client.acl_setuser("default", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-info"])
    _, found = doctor_checks.redis(Installation(Home(tmp_path), {"HEADGATE_REDIS_URL": own_redis.url}))
    assert (found.state, found.says) == ("warning", "its maxmemory-policy could not be read")


def test_the_doctor_names_a_postgresql_that_may_lose_what_it_confirmed(database_url: str, tmp_path: Path) -> None:
    """The test databases do not wait for their disk."""
    migrate.upgrade(database_url)
    (found,) = doctor_checks.database(Installation(Home(tmp_path), {"HEADGATE_DATABASE_URL": database_url}))
    is_postgresql = database_url.startswith("postgresql")
    assert (found.state, "synchronous_commit" in found.says) == (("failing", True) if is_postgresql else ("ok", False))
