"""A process ends with the one that started it, whatever else it hears or does not hear."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from load import stretched

PARENT = """
import os, subprocess, sys, time
command = [sys.executable, *sys.argv[1:], str(os.getpid())]
print(subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True).pid, flush=True)
time.sleep(60)
"""
SLEEPER = """
import os, pathlib, sys, time
from workers.process.children.parent import die_with
die_with(int(sys.argv[1]))
pathlib.Path(os.environ.get("READY", os.devnull)).touch()
time.sleep(60)
"""
KINDS = ("gateway.intake.checking_process", "gateway.journal.poster_process", "workers.engine.grammars.compile_child")


def until_gone(pid: int) -> None:
    until = time.monotonic() + stretched(60)
    while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        if time.monotonic() > until:
            os.kill(pid, signal.SIGKILL)
            pytest.fail(f"{pid} lives on")
        time.sleep(0.02)


@pytest.mark.parametrize("command", [("-c", SLEEPER), *(("-m", kind) for kind in KINDS)], ids=("sleeper", *KINDS))
def test_a_process_dies_with_a_parent_that_is_killed_although_its_link_stays_open(command: tuple[str, str]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, *command], stdin=theirs.fileno(), stdout=subprocess.PIPE, text=True
        )
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
        parent.communicate()
        until_gone(pid)


def test_a_stopped_process_dies_with_its_parent(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    command, env = [sys.executable, "-c", PARENT, "-c", SLEEPER], {**os.environ, "READY": str(ready)}
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    assert parent.stdout is not None
    pid, until = int(parent.stdout.readline()), time.monotonic() + stretched(60)
    while not ready.exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    os.kill(pid, signal.SIGSTOP)
    parent.kill()
    parent.communicate()
    until_gone(pid)


def test_a_process_whose_parent_has_ended_already_ends() -> None:
    done = subprocess.run([sys.executable, "-c", SLEEPER, "1"], check=False, timeout=stretched(60))
    assert done.returncode == 1
