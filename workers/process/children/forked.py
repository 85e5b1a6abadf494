"""A process that is made by fork, without exec: it begins with the modules that its parent has loaded, and shares their
memory until either of them writes to it.

The parent must have no threads at that moment, because the child has only the thread that forked. What the parent has open
stays closed to the child, but for the descriptors that are named. `Forked` looks like `asyncio.subprocess.Process`.

`give_back` and `ending` are for every process, whichever way it was made.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence

from workers.process.children.parent import die_with

_PR_SET_NAME = 15
_NAME_BYTES = 15
_libc = ctypes.CDLL(None, use_errno=True)
_DEFAULTS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)


def watch_without_threads() -> None:
    """Lets asyncio notice the end of its subprocesses by descriptors. Before Python 3.12 each of them takes a thread."""
    if sys.version_info < (3, 12) and hasattr(os, "pidfd_open"):
        watcher = asyncio.PidfdChildWatcher()
        watcher.attach_loop(asyncio.get_running_loop())
        asyncio.set_child_watcher(watcher)


def load(modules: Sequence[str]) -> None:
    """Imports what children will need. They share it, as the collector leaves it alone from now on. It runs afterwards,
    here and in them, even if it did not before. What the imports needed and freed goes back, so that no child has it."""
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    gc.enable()
    give_back()


def give_back() -> None:
    """Returns memory that the start needed and the process no longer does, where the C library can. glibc holds on to
    what lies between blocks that are in use, which behind the loading of a model is as much as the model."""
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(0)


def ending(code: int) -> str:
    """Says how a process ended, from what `wait` returned."""
    if code >= 0:
        return f"exit code {code}"
    names = {one.value: one.name for one in signal.Signals}  # real-time signals have none
    return f"signal {names.get(-code, -code)}"


def may_fork() -> bool:
    """Says whether this process has no thread that a child would lack."""
    return threading.active_count() == 1 and hasattr(os, "pidfd_open")


class Forked:
    """A living child. Its end is noticed by the running loop."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        self._pidfd = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_end)

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:  # until then the kernel keeps the number for this child
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fork(
    entry: Callable[[], int],
    name: str,
    *,
    env: Mapping[str, str],
    output: int | None = None,
    keep: Collection[int] = (),
    death_signal: signal.Signals,
    own_session: bool = False,
) -> Forked:
    """Starts `entry` in a child, whose status is what it returns. `output` is where it writes; by default it writes where
    this process does. `keep` are the descriptors that it inherits. It gets `death_signal` when this process ends.
    """
    assert may_fork(), threading.enumerate()
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    # A signal that came before the child has its own handlers would be taken by the parent's, and be lost.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return Forked(pid)
    status = 1
    try:
        die_with(parent, death_signal)
        _libc.prctl(_PR_SET_NAME, name.encode()[:_NAME_BYTES])
        if own_session:
            os.setsid()
        _become(env, output, keep)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        status = _run(entry)
    finally:
        # Nothing of the parent's frames may run in the child: they would close descriptors that are the child's now.
        os._exit(status)


def _become(env: Mapping[str, str], output: int | None, keep: Collection[int]) -> None:
    signal.set_wakeup_fd(-1)
    if sys.version_info < (3, 12):
        asyncio.set_event_loop_policy(None)  # the parent's knows the parent's children
    for number in _DEFAULTS:
        signal.signal(number, signal.SIG_DFL)
    # As an interpreter begins: a write to a client that has left is an error of that write, and ends nobody.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    if output is not None:
        os.dup2(output, 1)
        os.dup2(output, 2)
    kept = {0, 1, 2, *keep}
    for fd in [int(one) for one in os.listdir("/proc/self/fd")]:
        if fd not in kept:
            with contextlib.suppress(OSError):
                os.close(fd)
    for fd in keep:
        os.set_inheritable(fd, True)
    os.environ.clear()
    os.environ.update(env)


def _run(entry: Callable[[], int]) -> int:
    try:
        status = entry()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as an interpreter's own end does
        traceback.print_exc()
        status = 1
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status
