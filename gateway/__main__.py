"""`python -m gateway`: one gateway process. An error at its start is one sentence and a non-zero exit."""

from __future__ import annotations

import ctypes
import os
import sys

import uvloop

from gateway.base import settings
from gateway.server import serve
from workers.process import logs, turns

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""The values of these options in malloc.h."""
FAILED = 1
"""The status of a start that may succeed later, so that a supervisor tries again; 78 is for a setting.
"""
NUM_ARENAS = 2
LARGE_BYTES = 128 * 1024
"""The size from which an allocation has its own pages, which go back when it is freed."""
HAND_OVER_S = 0.0005
"""The time after which a thread hands over the interpreter lock that another one waits for. The loop needs the lock anew
for each of its events, some ten for a request; with the interpreter's own 5 ms, a thread that reads a body of 4 MiB
delays each of them by as much.
"""


def main() -> int:
    keep_memory_whole()
    try:
        loaded = settings.load()
        logs.configure(loaded.log_level)
        answer_promptly()
        uvloop.run(serve(loaded))
    except settings.SettingsError as error:
        print(f"headgate gateway: {error}", file=sys.stderr)
        return os.EX_CONFIG
    except settings.CannotStartYet as error:
        print(f"headgate gateway: {error}", file=sys.stderr)
        return FAILED
    return 0


def answer_promptly() -> None:
    """Lets the loop have a core and the interpreter lock soon when something has come for it; call it before there are
    threads. They have short turns as well: one that holds the lock and waits for a core would hold up the loop.
    """
    sys.setswitchinterval(HAND_OVER_S)
    turns.shorten()


def keep_memory_whole() -> None:
    """Keeps what is freed from being held in holes of the allocator (glibc); call it before there are threads.

    glibc gives each thread its own arena, which keeps the memory of its largest transaction or check. With a
    thread for each connection to SQLite that is many times the memory of one transaction. And once a large buffer was
    freed, glibc takes buffers of that size, up to 32 MiB, out of the arena too, where small blocks then lie between
    them. Setting a threshold ends that.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none, and no arenas
    if mallopt is not None:
        mallopt(M_ARENA_MAX, NUM_ARENAS)
        mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(M_TRIM_THRESHOLD, LARGE_BYTES)


if __name__ == "__main__":
    sys.exit(main())
