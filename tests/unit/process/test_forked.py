"""A forked process has what its parent has loaded, and nothing that its parent has open."""

from __future__ import annotations

import os
import subprocess
import sys

from load import stretched

SCRIPT = """
import asyncio, os, signal, sys, threading
from workers.process.children.forked import Forked, fork, load, may_fork, watch_without_threads

def entry():
    is_open = [os.path.exists(f"/proc/self/fd/{one}") for one in (kept, secret)]
    print("child", os.environ["WORD"], len(os.environ), os.getsid(0) == os.getpid(), *is_open, flush=True)
    print(asyncio.run(answer()), signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, flush=True)
    return 7

def waits():
    asyncio.run(asyncio.sleep(60))
    return 0

async def answer():
    child = await asyncio.create_subprocess_exec("true")
    return await child.wait()

async def main():
    watch_without_threads()
    before = await asyncio.create_subprocess_exec("sleep", "0.2")
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: None)
    assert may_fork()
    child = fork(entry, "a-long-name-of-a-process", env={"WORD": "x"}, keep=(kept,), death_signal=signal.SIGKILL, own_session=True)
    assert await child.wait() == 7 and child.returncode == 7
    child.kill()  # it has ended: nobody else is hit
    slow = fork(waits, "slow", env={}, death_signal=signal.SIGKILL)
    slow.terminate()
    assert await slow.wait() == -signal.SIGTERM
    assert await before.wait() == 0
    await asyncio.to_thread(lambda: None)
    print("threads", may_fork())

kept, secret = os.open("/dev/null", os.O_RDONLY), os.open("/dev/null", os.O_RDONLY)
load(("json",))
asyncio.run(main())
"""

BROKEN = """
import asyncio, signal, socket
from workers.process.children.forked import fork, watch_without_threads

def entry():
    ours, theirs = socket.socketpair()
    theirs.close()
    try:
        ours.send(b"for a client that has left")
    except BrokenPipeError:
        return 3
    return 0

async def main():
    watch_without_threads()
    print(await fork(entry, "writes", env={}, death_signal=signal.SIGKILL).wait())

asyncio.run(main())
"""


def _run(script: str) -> list[str]:
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=env, timeout=stretched(60), check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_it_runs_with_its_own_environment_and_descriptors_and_its_end_is_noticed():
    assert _run(SCRIPT) == ["child x 1 True True False", "0 True", "threads False"]


def test_writing_to_a_peer_that_has_left_is_an_error_and_not_its_end():
    """With SIGPIPE as the kernel has it, a client that left at the right moment ended its gateway."""
    assert _run(BROKEN) == ["3"]
