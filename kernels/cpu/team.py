"""Runs a compiled function in each of torch's threads, as torch's own parallel loops do, and shares the pieces of a
stage among them.

It knows the entry of libgomp, or of a library that replaces it. A separate team of threads would compete with torch's
for the cores: libgomp's threads spin for a while after each loop.
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
"""Bytes of a cache line: counters of different threads do not share one."""
_PATIENCE = 4096
"""Number of reads of a counter before a thread sleeps: some 100 to 250 µs, longer than any piece that is not held up."""

_system_call = types.ExternalFunction("syscall", types.int64(*[types.int64] * 7))
_FUTEX, _WAIT, _WAKE, _EVERYONE = 202, 128, 129, 1 << 30
"""Numbers of Linux on x86-64: the call, and its operations on an address that one process alone uses."""


@njit(nogil=True)
def stage_bytes(threads):
    """Returns the bytes of a stage's counters, which are zeros at first: for each thread the pieces of its run that
    were taken, then the pieces that are done, and the threads that sleep until all are."""
    return LINE * (threads + 1)


@njit(nogil=True)
def take(stage, thread, threads, pieces):
    """Returns a piece that no thread has taken; `pieces` if there is none left. Each thread first takes the pieces of
    its own run, and then those of the others' runs: neighbouring pieces are adjacent in memory, and a core reads
    sequential memory faster than every other piece."""
    for further in range(threads):
        owner = (thread + further) % threads
        piece = pieces * owner // threads + add_at(stage + LINE * owner, 1)
        if piece < pieces * (owner + 1) // threads:
            return piece
    return pieces


@njit(nogil=True)
def done(stage, threads, pieces):
    counter = stage + LINE * threads
    if add_at(counter, 1) + 1 == pieces and seen_at(counter + 8) != 0:
        _system_call(_FUTEX, counter, _WAKE, _EVERYONE, 0, 0, 0)


@njit(nogil=True)
def finish(stage, threads, pieces):
    """Waits until the pieces of a stage are done. A thread that has looked for long sleeps: what it waits for is held
    by a thread without a core, which can have this one's."""
    counter, looks = stage + LINE * threads, 0
    seen = seen_at(counter)
    while seen < pieces:
        if looks < _PATIENCE:
            pause()
        else:
            if looks == _PATIENCE:
                add_at(counter + 8, 1)
            # This returns at once if a piece was done since `seen` was read.
            _system_call(_FUTEX, counter, _WAIT, seen, 0, 0, 0)
        looks += 1
        seen = seen_at(counter)


def run(function: int, job: torch.Tensor, threads: int) -> None:
    """Calls the function at an address with the job's address, in so many threads (`size`)."""
    start = _parallel()
    if threads == 1 or start is None:
        _FUNCTION(function)(job.data_ptr())
    else:
        start(function, job.data_ptr(), threads, 0)


def size() -> int:
    """Returns the number of threads for the next job, which is torch's."""
    return 1 if _parallel() is None else torch.get_num_threads()


_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_int64)


@cache
def _parallel() -> Callable[[int, int, int, int], None] | None:
    """Returns the library's entry, or None if torch has another kind of threads: then one thread runs."""
    torch.ones(1 << 16).sum()  # this makes torch load the library
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        fields = line.split(None, 5)  # a path may have spaces
        if len(fields) == 6 and _LIBRARY.search(fields[5]):
            try:
                found = getattr(ctypes.CDLL(fields[5]), "GOMP_parallel", None)
            except OSError:  # the file was replaced
                continue
            if found is not None:
                found.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
                found.restype = None
                start: Callable[[int, int, int, int], None] = found
                return start
    return None
