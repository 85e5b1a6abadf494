"""The threads of torch: a compiled function runs in each of them, as torch's own parallel loops do, and how they share
the pieces of a stage.

Knows libgomp's entry, or that of a library in its place. A team of our own would fight with torch's for the cores:
libgomp's threads spin for a while after each loop.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from numba import njit, types

from kernels.cpu.lanes import add_at, pause, seen_at

_LIBRARY = re.compile(r"/lib(gomp|iomp5|omp)[^/]*\.so[.\d]*$")
LINE = 64
"""Bytes of a line of the cache: counters of different threads do not share one."""
_PATIENCE = 4096
"""Looks at a counter before a thread lets others have its core."""

_sched_yield = types.ExternalFunction("sched_yield", types.int32())


@njit(nogil=True)
def stage_bytes(threads):
    """Of a stage's counters, zeros at first: pieces that each thread's run has given away, then pieces that are done."""
    return LINE * (threads + 1)


@njit(nogil=True)
def take(stage, thread, threads, pieces):
    """A piece that nobody has taken; `pieces` if there is none left. Each thread goes through a run of its own, and
    then helps the others with theirs: neighbours lie side by side in memory, and a core that reads on and on reads
    faster than one that reads every other piece."""
    for further in range(threads):
        owner = (thread + further) % threads
        piece = pieces * owner // threads + add_at(stage + LINE * owner, 1)
        if piece < pieces * (owner + 1) // threads:
            return piece
    return pieces


@njit(nogil=True)
def done(stage, threads):
    add_at(stage + LINE * threads, 1)


@njit(nogil=True)
def finish(stage, threads, pieces):
    """Waits until the pieces of a stage are done."""
    counter, looks = stage + LINE * threads, 0
    while seen_at(counter) < pieces:
        pause()
        looks += 1
        if looks % _PATIENCE == 0:
            _sched_yield()


def run(function: int, job: torch.Tensor) -> None:
    """Calls the function at an address with the job's address, in as many threads as torch has here."""
    threads, start = torch.get_num_threads(), _parallel()
    if threads == 1 or start is None:
        _FUNCTION(function)(job.data_ptr())
    else:
        start(function, job.data_ptr(), threads, 0)


def size() -> int:
    """Threads that `run` takes at most."""
    return torch.get_num_threads() if _parallel() is not None else 1


_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_int64)


@cache
def _parallel() -> Callable[[int, int, int, int], None] | None:
    """None where torch has another kind of threads: then there is one."""
    torch.ones(1 << 16).sum()  # the library is loaded with torch
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = line.split()[-1]
        if _LIBRARY.search(path):
            found = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
            if found is not None:
                found.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
                found.restype = None
                start: Callable[[int, int, int, int], None] = found
                return start
    return None
