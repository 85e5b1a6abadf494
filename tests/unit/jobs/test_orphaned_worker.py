"""A Celery worker whose jobs process has died ends with its children after a drain, whatever hangs in them."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from celery import Celery, signals
from load import stretched

from workers.jobs import worker
from workers.jobs.base.settings import JobsSettings

JOBS = """
import subprocess, sys
subprocess.Popen(["sleep", "60"])
print(subprocess.Popen([sys.executable, "-c", sys.argv[1]]).pid, flush=True)
sys.stdin.read()
"""
WORKER = """
import os, subprocess, sys, time
from workers.jobs import worker
parent = os.getppid()
subprocess.Popen(["sleep", "60"])
while os.getppid() == parent:
    time.sleep(0.01)
worker._end_in(0.1)
time.sleep(60)
"""


def of_group(group: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state, _, its = (path / "stat").read_text().rpartition(") ")[2].split()[:3]
        except OSError:
            continue
        if int(its) == group and state != "Z":
            found.append(int(path.name))
    return found


def until(condition) -> None:
    limit = time.monotonic() + stretched(60)
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_an_orphaned_worker_kills_its_children_and_itself_after_the_time_of_a_drain() -> None:
    """What else its group has, such as the other programs of a pipeline, stays."""
    command = [sys.executable, "-c", JOBS, WORKER]
    jobs = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    until(lambda: len(of_group(jobs.pid)) == 4)
    jobs.kill()
    jobs.wait()
    until(lambda: len(of_group(jobs.pid)) == 1)
    os.killpg(jobs.pid, signal.SIGKILL)
    jobs.communicate()


@pytest.mark.parametrize(("is_orphan", "wanted"), [(True, [(30.0,)]), (False, [])])
def test_a_worker_that_is_told_to_end_sees_whether_its_jobs_process_lives(
    is_orphan: bool, wanted: list[tuple[float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[float]] = []
    monkeypatch.setattr(worker, "_end_in", lambda *asked: told.append(asked))
    settings = JobsSettings(home=tmp_path, url="http://127.0.0.1:1", broker_url="redis://")
    process = worker.Process(settings, mmap.mmap(-1, 1))
    if is_orphan:
        process.parent = 1
        monkeypatch.setattr(worker.os, "getppid", lambda: 2)
    before = list(signals.worker_shutting_down.receivers or ())
    try:
        worker._connect(Celery(), process)
        signals.worker_shutting_down.send(None)
    finally:
        signals.worker_shutting_down.receivers = before
    assert (told, process.is_draining()) == (wanted, True)
