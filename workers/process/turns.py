"""Short turns on a core, for threads that run briefly and often because somebody waits for their answer.

Linux gives a thread that wakes up no core before the running thread has had its turn, 1 to 4 ms, unless the waking one
asks for shorter turns than the running one has. Shares of the processor's time do not depend on it, and it needs no
privilege. Work that nobody waits for steps back instead. This module knows nothing of what the threads do.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import random
import sys
import time
from pathlib import Path

TURN_NS = 100_000
"""The length of a turn, the shortest that Linux takes (from 6.12 on). What takes longer takes several turns."""

AUTOGROUP = Path("/proc/self/autogroup")
AUTOGROUP_S, AUTOGROUP_TRIES = 0.1, 20
"""The seconds in which Linux takes one session's priority of all that processes without privileges set, and how often it is
tried.
"""
_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}
"""Machine → the numbers of `sched_setattr` and `sched_getattr`, which the C library has no functions for."""
_ORDINARY = {0, 3}
"""SCHED_OTHER and SCHED_BATCH. Any other policy was chosen by an operator, and stays."""


class _Attributes(ctypes.Structure):
    """`struct sched_attr` of sched_setattr(2), its first version."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def shorten(pid: int = 0) -> bool:
    """Asks for short turns for the calling thread, or for the main thread of a process, and for all threads and
    processes that it starts from then on. Returns whether the system gives them: Linux does from 6.12 on, unless a
    container forbids the call. Nothing is changed where it does not.
    """
    if turn_ns(pid) is None:
        return False
    told = _read(pid)
    if told is None or told.policy not in _ORDINARY:
        return False
    told.runtime = TURN_NS
    _call(0, pid, ctypes.byref(told), 0)
    return turn_ns(pid) == TURN_NS


def turn_ns(pid: int = 0) -> int | None:
    """Returns the nanoseconds of a turn; None where the system does not tell."""
    told = _read(pid)
    return told.runtime or None if told is not None else None


def step_back(niceness: int) -> None:
    """Gives this process the system's turns again and a lower priority, as for work that may take the cores that nobody
    wants. If it leads a session the session gets that priority too: where Linux divides cores among sessions first
    (sched(7), autogroup), a process's own priority counts only inside of its session. Nothing is changed where the system
    forbids it.
    """
    told = _read(0)
    if told is not None and told.policy in _ORDINARY:
        told.runtime = 0  # the system's own length
        _call(0, 0, ctypes.byref(told), 0)
    with contextlib.suppress(OSError):
        os.nice(niceness)
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):
            _step_back_as_session(niceness)


def _step_back_as_session(niceness: int) -> None:
    """Raises `OSError` where the system knows no priority of sessions."""
    for _ in range(AUTOGROUP_TRIES):
        try:
            AUTOGROUP.write_text(str(niceness))
            return
        except BlockingIOError:
            time.sleep(random.uniform(1, 2) * AUTOGROUP_S)


def _read(pid: int) -> _Attributes | None:
    told = _Attributes()
    size = ctypes.sizeof(told)
    return told if _call(1, pid, ctypes.byref(told), size, 0) else None


def _call(which: int, *arguments: object) -> bool:
    numbers = _CALLS.get(platform.machine())
    if sys.platform != "linux" or numbers is None:
        return False
    return bool(ctypes.CDLL(None).syscall(numbers[which], *arguments) == 0)
