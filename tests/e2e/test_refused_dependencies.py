"""O1, O3: a start without room, and any command without its database, is one sentence with what to do, at once."""

from __future__ import annotations

import os
import socket
import sqlite3
import subprocess
from pathlib import Path

import pytest
import redis
from disks import fill, mounted
from load import stretched
from own_redis import OwnRedis
from running import HEADGATE

from gateway.cli.exit_codes import CONFIG, FAILED

MIB = 1024 * 1024


def run(home: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [HEADGATE, *arguments, "--home", str(home)],
        capture_output=True,
        text=True,
        timeout=stretched(100),
        check=False,
        env={**os.environ, **env},
    )


def refused(home: Path, *arguments: str, status: int = FAILED, **env: str) -> str:
    """The one sentence, behind what `up` says of its models and of what it waits for."""
    done = run(home, *arguments, **env)
    output = done.stdout + done.stderr
    assert done.returncode == status, output
    lines = [line for line in done.stderr.splitlines() if not line.startswith(("Waiting for ", "headgate-demo: "))]
    assert len(lines) == 1, output
    assert lines[0].startswith("headgate: ")
    return lines[0]


UP = ("up", "--port", "0")
COMMANDS = (
    UP,
    ("migrate",),
    ("migrate", "--check"),
    ("verify-books",),
    ("journals", "list"),
    ("keys", "create", "--admin", "--name", "x"),
)


URLS = {
    "mysql": ("mysql://u:secret@h/db", "mysql://", CONFIG),
    "nonsense": ("no url at all", "no url at all", CONFIG),
    "nobody listens": ("postgresql+psycopg://u:secret@127.0.0.1:1/db", "u:***@127.0.0.1:1/db", FAILED),
    "no such folder": ("sqlite+aiosqlite:////nonexistent/books.db", "/nonexistent/books.db", FAILED),
}


@pytest.mark.parametrize(
    ("command", "url", "names", "status"),
    [
        pytest.param(command, *URLS[name], id=f"{name}-{' '.join(command)}")
        for number, command in enumerate(COMMANDS)
        for turn, name in enumerate(URLS)
        # The others have one URL of each kind: a wrong setting, and a database that may come back.
        if command is UP or (number + turn) % 2
    ],
)
def test_o3_every_command_names_a_database_that_cannot_be_used(
    tmp_path: Path, command: tuple[str, ...], url: str, names: str, status: int
) -> None:
    """A URL of no database is a wrong setting, which no second start mends; a database may come back."""
    line = refused(tmp_path / "home", *command, status=status, HEADGATE_DATABASE_URL=url)
    assert names in line
    assert "HEADGATE_DATABASE_URL" in line
    assert "secret" not in line


def test_o3_a_database_server_that_is_silent_is_given_up(tmp_path: Path) -> None:
    """It takes the connection and says nothing: libpq alone would wait for ever."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql+psycopg://u@127.0.0.1:{silent.getsockname()[1]}/db"
        line = refused(tmp_path / "home", *UP, HEADGATE_DATABASE_URL=url)
    assert "timeout" in line


def test_o3_a_locked_sqlite_file_is_named(tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert run(home, "migrate").returncode == 0
    with sqlite3.connect(home / "headgate.db", isolation_level=None) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        assert "database is locked" in refused(home, *UP)
    connection.close()


def test_o1_a_start_on_a_disk_without_room_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", 100 * MIB) as disk:
        line = refused(disk / "home", *UP)
        assert "MiB free, and a start needs 144" in line
        assert "Make room" in line


def test_o1_a_start_on_a_disk_filled_to_the_last_byte_is_refused(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", 200 * MIB) as disk:
        assert run(disk / "home", "migrate").returncode == 0
        fill(disk)
        assert "has 0 MiB free" in refused(disk / "home", *UP)


def test_o1_a_redis_that_refuses_writes_is_named(tmp_path: Path, own_redis: OwnRedis) -> None:
    with redis.Redis.from_url(own_redis.url) as client:
        client.config_set("maxmemory", 1)
    line = refused(tmp_path / "home", *UP, HEADGATE_REDIS_URL=own_redis.url)
    assert "it has no memory left" in line
    assert "HEADGATE_REDIS_URL" in line
