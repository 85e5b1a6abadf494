"""A child whose loop stands still is killed and restarted. Looks are made by hand, so that no test depends on times."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
import time

import pytest

from gateway.cli.heartbeats import MAX_SILENT
from gateway.cli.supervisor import MAX_LATE, Spec, Supervisor

NEVER_S = 3600.0
BEATS = """
import asyncio, os
from workers.process.heartbeat import Heartbeat
async def main():
    Heartbeat(int(os.environ["HEADGATE_HEARTBEAT_FD"]), beat_s=0.01).begin()
    await asyncio.sleep(60)
asyncio.run(main())
"""
BEATS_ONCE = 'import os, time; os.eventfd_write(int(os.environ["HEADGATE_HEARTBEAT_FD"]), 1); time.sleep(60)'
STARTS = "import time; time.sleep(60)"


def spec(script: str, name: str = "worker-0") -> Spec:
    return Spec("worker", name, [sys.executable, "-c", script], os.environ, stop_limit_s=5, beats=True)


@pytest.fixture
async def make_supervisor(tmp_path):
    made = list[Supervisor]()

    def make(look_s: float) -> Supervisor:
        async def on_change() -> None:
            one.changes.append(1)

        one = Supervisor(tmp_path, on_change, look_s)
        one.changes = []
        made.append(one)
        return one

    yield make
    for one in made:
        one.kill_all()
        await one.close()


@pytest.fixture
async def supervisor(make_supervisor):
    return make_supervisor(NEVER_S)


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - another process has no event
            await asyncio.sleep(0.01)


def has_beaten(supervisor: Supervisor) -> bool:
    fd = supervisor._children[0].heartbeats.fd
    return bool(select.select([fd], [], [], 0)[0])


def look(supervisor: Supervisor, times: int, *, after_s: float = NEVER_S) -> None:
    for _ in range(times):
        supervisor._looked_at = time.monotonic() - after_s
        supervisor._end_hung()


async def stop_one_that_has_beaten(supervisor: Supervisor) -> int:
    await supervisor.start(spec(BEATS))
    await until(lambda: has_beaten(supervisor))
    [pid] = supervisor.pids("worker")
    os.kill(pid, signal.SIGSTOP)
    look(supervisor, 1)
    return pid


async def test_a_child_whose_loop_stands_still_is_killed_and_restarted(supervisor, capfd):
    supervisor.ready = True
    pid = await stop_one_that_has_beaten(supervisor)
    look(supervisor, MAX_SILENT - 1)
    os.kill(pid, 0)
    look(supervisor, 1)
    await until(lambda: supervisor.changes)
    assert supervisor.pids("worker") != [pid]
    assert "worker-0 has stood still for" in capfd.readouterr().err
    assert "worker-0 ended with signal SIGKILL, because it stood still: " in supervisor.refusal("worker-0")
    await until(lambda: has_beaten(supervisor))  # it has a descriptor of its own


async def test_a_child_whose_loop_turns_but_that_is_not_well_is_killed(supervisor):
    """A worker whose engine thread hangs."""
    not_well = BEATS.replace('"]), beat_s', '"]), lambda: next(well), beat_s')
    await supervisor.start(
        spec(f"import itertools; well = itertools.chain([True], itertools.repeat(False))\n{not_well}")
    )
    await until(lambda: has_beaten(supervisor))
    look(supervisor, MAX_SILENT)
    assert not supervisor._children[0].is_hung
    look(supervisor, 1)
    assert supervisor._children[0].is_hung


async def test_a_child_that_beats_is_left_alone(supervisor):
    await supervisor.start(spec(BEATS))
    for _ in range(2 * MAX_SILENT):
        await until(lambda: has_beaten(supervisor))
        look(supervisor, 1)
    assert not supervisor._children[0].is_hung


async def test_a_child_that_has_not_begun_to_beat_is_left_alone(supervisor):
    """It loads a model, or compiles its kernels."""
    await supervisor.start(spec(STARTS))
    look(supervisor, 10 * MAX_SILENT)
    assert not supervisor._children[0].is_hung


async def test_looks_that_come_late_tell_nothing(supervisor):
    """A machine that was suspended, or so busy that the supervisor had no core, would have lost every process."""
    await stop_one_that_has_beaten(supervisor)
    for _ in range(3):
        look(supervisor, MAX_SILENT - 1)
        look(supervisor, 1, after_s=2 * MAX_LATE * NEVER_S)
    assert not supervisor._children[0].is_hung
    look(supervisor, MAX_SILENT)
    assert supervisor._children[0].is_hung


async def test_a_child_that_drains_is_not_killed_for_its_silence(supervisor):
    pid = await stop_one_that_has_beaten(supervisor)
    supervisor.begin_stop()
    look(supervisor, 2 * MAX_SILENT)
    assert not supervisor._children[0].is_hung
    os.kill(pid, signal.SIGCONT)


async def test_the_supervisor_looks_by_itself(make_supervisor, monkeypatch):
    monkeypatch.setattr("gateway.cli.supervisor.MAX_LATE", 4)
    supervisor = make_supervisor(0.3)
    await supervisor.start(spec(BEATS_ONCE))
    await until(lambda: supervisor.changes)
    assert not supervisor.failed.done()
