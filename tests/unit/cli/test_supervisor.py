"""With real children: short shell commands."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import signal
import subprocess
import sys

import pytest
from load import stretched

from gateway.base.home import write_private
from gateway.cli import supervisor as module
from gateway.cli.supervisor import Child, ChildRefused, Spec, Supervisor
from workers.process.children.forked import ending


def spec(script: str, kind: str = "worker", **more) -> Spec:
    return Spec(kind, f"{kind}-0", ["/bin/sh", "-c", script], os.environ, **more)


@pytest.fixture
async def supervisor(tmp_path):
    changes: list[int] = []

    async def on_change() -> None:
        changes.append(1)

    one = Supervisor(tmp_path, on_change)
    one.changes = changes
    yield one
    one.kill_all()
    await one.close()


async def until(condition, limit_s: float = 5.0) -> None:
    async with asyncio.timeout(stretched(limit_s)):
        while not condition():  # noqa: ASYNC110 - another process has no event
            await asyncio.sleep(0.01)


async def test_a_killed_child_is_restarted_and_the_owner_is_told(supervisor):
    await supervisor.start(spec("exec sleep 60"))
    (old,) = supervisor.pids("worker")
    os.kill(old, signal.SIGKILL)
    await until(lambda: supervisor.changes)
    (new,) = supervisor.pids("worker")
    assert new != old
    os.kill(new, 0)


async def test_three_deaths_before_it_was_ready_end_the_start_with_the_childs_last_line(supervisor):
    await supervisor.start(spec("echo first; echo the disk is full; exit 3"))
    failure = await asyncio.wait_for(supervisor.failed, stretched(10))
    assert "the disk is full" in str(failure)
    assert "exit code 3" in str(failure)
    assert not isinstance(failure, ChildRefused)


async def test_a_child_that_says_why_it_cannot_start_is_not_restarted(supervisor):
    line = '{"level": "ERROR", "msg": "The model is broken."}'
    await supervisor.start(spec(f"echo '{line}'; exit {os.EX_CONFIG}"))
    failure = await asyncio.wait_for(supervisor.failed, stretched(5))
    assert str(failure) == "The model is broken."
    assert isinstance(failure, ChildRefused)
    assert supervisor.changes == []


async def test_once_ready_a_dying_child_never_ends_the_run(supervisor):
    supervisor.ready = True
    await supervisor.start(spec("exit 1"))
    await until(lambda: len(supervisor.changes) >= 2)
    assert not supervisor.failed.done()


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("exit 3", "exit code 3"),
        ("exit 0", "exit code 0"),
        ("kill -SEGV $$", "signal SIGSEGV"),
        ("kill -KILL $$", "signal SIGKILL, as the kernel ends a process where memory is short"),
    ],
)
async def test_once_ready_the_end_of_a_child_is_told_with_its_last_line(supervisor, tmp_path, end, told):
    """Its first end, so that a reload does not wait for it."""
    supervisor.ready = True
    await supervisor.start(spec(f"echo first; echo the last; {end}"))
    await until(lambda: supervisor.refusal("worker-0"))
    log = tmp_path / "worker-0.log"
    assert supervisor.refusal("worker-0") == f"worker-0 ended with {told}: the last (see {log})"
    assert not supervisor.failed.done()


async def test_before_it_was_ready_a_child_may_end_and_start_again(supervisor):
    await supervisor.start(spec("exit 3"))
    await until(lambda: supervisor.changes)
    assert supervisor.refusal("worker-0") == ""


async def test_a_stop_waits_for_the_child_to_finish_its_work(supervisor, tmp_path):
    done = tmp_path / "done"
    script = f"trap 'sleep 0.2; touch {done}; exit 0' TERM; echo up; while :; do sleep 0.01; done"
    await supervisor.start(spec(script))
    await until(lambda: (tmp_path / "worker-0.log").read_text() == "up\n")
    await supervisor.stop("worker")
    assert done.exists()


async def test_a_child_that_ignores_the_stop_is_killed(supervisor, tmp_path):
    await supervisor.start(spec("trap '' TERM; echo up; while :; do sleep 0.01; done", stop_limit_s=0.2))
    await until(lambda: (tmp_path / "worker-0.log").read_text() == "up\n")
    (pid,) = supervisor.pids("worker")
    await supervisor.stop("worker")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_children_die_with_a_supervisor_that_is_killed(tmp_path):
    script = f"""
import asyncio, os
from pathlib import Path
from gateway.cli.supervisor import Child, Spec, Supervisor
async def main():
    async def nothing(): pass
    s = Supervisor(Path({str(tmp_path)!r}), nothing)
    await s.start(Spec("worker", "worker-0", ["sleep", "60"], os.environ))
    print(s.pids("worker")[0], flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    pid = int(await process.stdout.readline())
    os.kill(pid, 0)
    process.kill()
    await process.wait()

    await until(lambda: is_gone(pid))


def test_the_last_line_is_searched_in_the_end_of_a_log_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LAST_BYTES", 64)
    log = tmp_path / "worker-0.log"
    log.write_bytes(b"first\n" + b"x" * 100 + b"\nlast\n")
    assert Child(Spec("worker", "worker-0", [], {}), log).last_line() == "last"
    log.write_bytes(b"last\n" + b"\n" * 100)
    assert Child(Spec("worker", "worker-0", [], {}), log).last_line() == "it wrote nothing to its log"


def test_the_last_record_of_a_child_is_that_of_its_present_process(tmp_path):
    log = tmp_path / "worker-0.log"
    before = b'{"event": "old"}\n'
    log.write_bytes(before + b'{"event": "weights_read", "share": 0.25}\n')
    child = Child(Spec("worker", "worker-0", [], {}), log, log_start=len(before))
    assert child.last_record() == {"event": "weights_read", "share": 0.25}
    assert child.last_line() == "weights_read"
    log.write_bytes(before + b"no record")
    assert (child.last_record(), child.last_line()) == ({}, "no record")
    log.write_bytes(before)
    assert child.last_line() == "it wrote nothing to its log"


async def kill_and_await_another(supervisor) -> None:
    (old,) = supervisor.pids("worker")
    os.kill(old, signal.SIGKILL)
    await until(lambda: supervisor.pids("worker") != [old])


async def test_a_full_disk_on_which_the_owner_cannot_write_does_not_end_restarts(tmp_path):
    async def on_change() -> None:
        write_private(tmp_path / "missing" / "ready.json", b"{}")

    supervisor = Supervisor(tmp_path, on_change)
    try:
        supervisor.ready = True
        await supervisor.start(spec("exec sleep 60"))
        await kill_and_await_another(supervisor)
        await kill_and_await_another(supervisor)
    finally:
        supervisor.kill_all()
        await supervisor.close()


async def test_a_terminal_that_is_gone_does_not_end_restarts(supervisor, monkeypatch):
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "wb", buffering=0) as raw:
        monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(raw, write_through=True))
        await supervisor.start(spec("exec sleep 60"))
        await kill_and_await_another(supervisor)
        await kill_and_await_another(supervisor)


async def test_a_machine_without_room_for_a_process_is_asked_again(supervisor, monkeypatch):
    refusals = [OSError(errno.EAGAIN, "Resource temporarily unavailable"), subprocess.SubprocessError("no memory")]
    start = asyncio.create_subprocess_exec

    async def refuse_at_first(*command, **more):
        if refusals:
            raise refusals.pop()
        return await start(*command, **more)

    monkeypatch.setattr("gateway.cli.supervisor.SPAWN_AGAIN_S", 0.01, raising=False)
    await supervisor.start(spec("exec sleep 60"))
    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse_at_first)
    await kill_and_await_another(supervisor)
    assert not refusals


async def test_a_log_that_somebody_deleted_does_not_end_restarts(supervisor, tmp_path, monkeypatch):
    monkeypatch.setattr("gateway.cli.supervisor.MAX_BACKOFF_S", 0.0)
    supervisor.ready = True
    await supervisor.start(spec(f"while [ -e {tmp_path}/worker-0.log ]; do sleep 0.01; done; exit {os.EX_CONFIG}"))
    (tmp_path / "worker-0.log").unlink()
    await until(lambda: supervisor.changes)


@pytest.mark.parametrize(
    ("code", "said"),
    [(3, "exit code 3"), (-9, "signal SIGKILL"), (-signal.SIGRTMIN - 1, f"signal {signal.SIGRTMIN + 1}")],
)
def test_every_ending_of_a_child_can_be_said(code: int, said: str) -> None:
    """Real-time signals between the first and the last have no name: the watcher ended, and nobody restarted the child."""
    assert ending(code) == said


LEAVES_ONE = "sleep 60 & kill -STOP $!; echo $! >{left}; "
"""A child starts a process that is stopped, so that it notices nothing."""


def left_by(path) -> int | None:
    return int(path.read_text()) if path.exists() and path.read_text().strip() else None


async def test_what_a_killed_child_left_behind_is_killed_even_if_it_is_stopped(supervisor, tmp_path):
    supervisor.ready = True
    left = tmp_path / "left"
    await supervisor.start(spec(LEAVES_ONE.format(left=left) + "wait"))
    await until(lambda: left_by(left))
    (pid,), behind = supervisor.pids("worker"), left_by(left)
    os.kill(pid, signal.SIGKILL)
    await until(lambda: is_gone(behind))
    assert supervisor._left == {}


async def test_what_a_stopped_child_left_behind_is_killed(supervisor, tmp_path):
    left = tmp_path / "left"
    await supervisor.start(spec(LEAVES_ONE.format(left=left) + "trap 'exit 0' TERM; while :; do sleep 0.01; done"))
    await until(lambda: left_by(left))
    await supervisor.stop("worker")
    await supervisor.close()
    await until(lambda: is_gone(left_by(left)))


async def test_a_group_whose_number_has_become_somebody_elses_is_forgotten(supervisor, monkeypatch):
    def refused(*_: int) -> None:
        raise PermissionError

    supervisor._left = {1: 0.0}
    monkeypatch.setattr(module.os, "killpg", refused)
    supervisor._end_groups()
    assert supervisor._left == {}


async def test_what_a_dead_child_started_may_finish_for_a_while_and_not_beyond_the_end_of_the_run(
    supervisor, tmp_path, monkeypatch
):
    monkeypatch.setattr(module, "GROUPS_S", 0.05)
    supervisor.ready = True
    left = tmp_path / "left"
    await supervisor.start(spec(LEAVES_ONE.format(left=left) + "exit 1", lingers_s=60.0))
    await until(lambda: len(supervisor.changes) > 1)
    groups = dict(supervisor._left)
    assert len(groups) > 1
    behind = left_by(left)
    await asyncio.sleep(0.2)
    assert not is_gone(behind)
    supervisor._left[next(iter(groups))] = 0.0
    await until(lambda: next(iter(groups)) not in supervisor._left)
    supervisor.kill_all()
    await supervisor.close()
    await until(lambda: is_gone(left_by(left)) and is_gone(behind))


async def test_a_child_that_refuses_while_others_serve_is_not_said_to_be_restarted_until_it_is(
    supervisor, capfd, monkeypatch
):
    """A reload gives up a new worker that refuses, and it was said to be restarted."""
    supervisor.ready = True
    await supervisor.start(spec(f"echo The model is broken.; exit {os.EX_CONFIG}"))
    await until(lambda: supervisor.refusal("worker-0"))
    await asyncio.sleep(0.05)
    assert capfd.readouterr().err == "worker-0 ended with exit code 78 (The model is broken.).\n"
    await supervisor.remove("worker-0")
    monkeypatch.setattr(module, "MAX_BACKOFF_S", 0.01)
    await supervisor.start(spec(f"echo The model is broken.; exit {os.EX_CONFIG}"))
    await until(lambda: supervisor.changes)
    assert "worker-0 is restarted.\n" in capfd.readouterr().err


def is_gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().split()[2] == "Z"
    except FileNotFoundError:
        return True
