"""`python -m gateway`: one gateway process. An error at its start is one sentence and a non-zero exit."""

from __future__ import annotations

import ctypes
import os
import sys

import uvloop

from gateway.base import settings
from gateway.server import serve
from workers.process import logs

M_ARENA_MAX = -8
"""The value of this option in malloc.h."""
NUM_ARENAS = 2


def main() -> int:
    few_arenas()
    try:
        loaded = settings.load()
        logs.configure(loaded.log_level)
        uvloop.run(serve(loaded))
    except settings.SettingsError as error:
        print(f"headgate gateway: {error}", file=sys.stderr)
        return os.EX_CONFIG
    return 0


def few_arenas() -> None:
    """Limits the number of malloc arenas; call it before there are threads. glibc gives each thread an arena of its
    own, which keeps the memory of its largest transaction or check. With a thread for each connection to SQLite that is
    many times the memory of one transaction.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none, and no arenas
    if mallopt is not None:
        mallopt(M_ARENA_MAX, NUM_ARENAS)


if __name__ == "__main__":
    sys.exit(main())
