"""Nothing outlives `headgate up`, however it ends, and even if a process below it is stopped and notices nothing."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import httpx2 as httpx
import pytest
from load import stretched
from running import Server, Starter

FORMAT = {"type": "json_schema", "json_schema": {"name": "one", "schema": {"type": "object"}, "strict": False}}
KINDS = {
    "checker": "gateway.intake.checking_process",
    "grammars": "workers.engine.grammars.compile_child",
    "redis": "redis.sock",
}
LARGE = 100_000
"""Characters of a body that a process of its own checks."""
GONE_S = 60.0


def tree(root: int) -> dict[int, str]:
    """The command of each process below `root`, by its id."""
    parents, commands = {}, {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(") ")[2].split()[1])
            commands[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            pass  # ended meanwhile
    found, left = {}, [root]
    while left:
        parent = left.pop()
        for pid in [pid for pid, its in parents.items() if its == parent]:
            found[pid] = commands[pid]
            left.append(pid)
    return found


def kinds_of(found: dict[int, str]) -> set[str]:
    return {kind for kind, part in KINDS.items() if any(part in command for command in found.values())}


def stoppable(found: dict[int, str]) -> list[int]:
    return [pid for pid, command in found.items() if any(KINDS[kind] in command for kind in ("checker", "grammars"))]


def listens(pid: int) -> bool:
    """Whether it has started, and waits for what it is sent."""
    try:
        return Path(f"/proc/{pid}/syscall").read_text().split()[0] in ("0", "63")  # read(2) on x86 and on ARM
    except OSError:
        return False


def lives(pid: int, command: str) -> bool:
    try:
        if Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[0] == "Z":
            return False
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace") == command
    except OSError:
        return False


def all_kinds(server: Server) -> dict[int, str]:
    """Makes the server start each kind of process, and returns them all."""
    until = time.monotonic() + 60
    client = server.client()
    while True:
        ask = [{"role": "user", "content": "x"}]
        client.chat.completions.create(model=server.model, messages=ask, max_tokens=2, response_format=FORMAT)
        httpx.post(
            server.ready["base_url"] + "/tokenize",
            json={"model": server.model, "prompt": "a " * LARGE},
            headers={"Authorization": f"Bearer {server.ready['api_key']}"},
            timeout=stretched(60),
        )
        found = tree(server.process.pid)
        if kinds_of(found) == set(KINDS) and all(listens(pid) for pid in stoppable(found)):
            return found
        assert time.monotonic() < until, (kinds_of(found), found)
        time.sleep(0.2)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_headgate_up_even_if_it_is_stopped(start_server: Starter, number: signal.Signals) -> None:
    server = start_server()
    found = all_kinds(server)
    for pid in stoppable(found):
        os.kill(pid, signal.SIGSTOP)
    server.process.send_signal(number)
    server.process.wait(GONE_S)
    try:
        until = time.monotonic() + GONE_S
        while left := {pid: command for pid, command in found.items() if lives(pid, command)}:
            assert time.monotonic() < until, left
            time.sleep(0.1)
    finally:
        for pid in left:
            os.kill(pid, signal.SIGKILL)
