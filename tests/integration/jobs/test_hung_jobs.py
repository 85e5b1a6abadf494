"""A real jobs process whose loop stands still is killed by its supervisor and starts again, and work goes on."""

from __future__ import annotations

import asyncio
import select
import sys
import time
from pathlib import Path

import pytest

from gateway.cli.heartbeats import MAX_SILENT
from gateway.cli.supervisor import Spec, Supervisor

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.rest]

NEVER_S = 3600.0
BLOCKED = """
import pathlib, sys, time
from workers.jobs import __main__ as jobs
from workers.process import heartbeat
heartbeat.Heartbeat.__init__.__kwdefaults__["blocked_s"] = 0.3

def block(self, is_waiting):
    while pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.05)

jobs.Jobs._watch = block
sys.exit(jobs.main())
"""
"""A jobs process whose loop stands still while the file is there: its watchdog, which runs on the loop, returns only then."""


async def until(condition, limit_s: float = 60.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - another process has no event
            await asyncio.sleep(0.05)


async def test_a_jobs_process_whose_loop_is_blocked_is_killed_with_its_stack_in_the_log_and_works_again(
    home, gateway, jobs, tmp_path: Path
):
    await asyncio.to_thread(jobs.stop)
    blocked = tmp_path / "blocked"
    changes: list[int] = []

    async def on_change() -> None:
        changes.append(1)

    supervisor = Supervisor(tmp_path, on_change, NEVER_S)
    supervisor.ready = True
    command = [sys.executable, "-c", BLOCKED, str(blocked)]
    await supervisor.start(Spec("jobs", "jobs", command, jobs.env, stop_limit_s=35, beats=True))
    try:
        log = tmp_path / "jobs.log"
        (pid,) = supervisor.pids("jobs")
        assert (await home.wait(await home.submit(["say a"]))).num_completed == 1
        for _ in range(2 * MAX_SILENT):  # work of any length leaves the loop free
            await until(lambda: has_beaten(supervisor))
            look(supervisor)
        assert not supervisor._children[0].is_hung
        blocked.touch()
        await until(lambda: "loop_blocked" in log.read_text())
        for _ in range(MAX_SILENT + 1):
            look(supervisor)
        blocked.unlink()
        await until(lambda: changes)
        assert supervisor.pids("jobs") != [pid]
        assert " block" in next(line for line in log.read_text().splitlines() if "loop_blocked" in line)
        assert (await home.wait(await home.submit(["say b"]), limit_s=60)).num_completed == 1
    finally:
        blocked.unlink(missing_ok=True)
        supervisor.begin_stop()
        await supervisor.stop("jobs")
        await supervisor.close()


def has_beaten(supervisor: Supervisor) -> bool:
    fd = supervisor._children[0].heartbeats.fd
    return bool(select.select([fd], [], [], 0)[0])


def look(supervisor: Supervisor) -> None:
    supervisor._looked_at = time.monotonic() - NEVER_S
    supervisor._end_hung()
