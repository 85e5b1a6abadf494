"""What a gateway frees goes back to the system."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
from load import stretched

CHURN = """
import ctypes
from pathlib import Path
from gateway.__main__ import keep_memory_whole
keep_memory_whole()
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.realloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
def private():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private"))
def round_of(size):
    large, small = [], []
    for _ in range(8):  # a large buffer, then a smaller block that stays
        place = libc.malloc(size)
        ctypes.memset(place, 1, size)
        large.append(place)
        small.append(libc.malloc(60_000))
    for place in large:
        libc.free(place)
round_of(4 << 20)  # from now on glibc would take 2 MiB out of the arena
before = private()
round_of(2 << 20)
print(private() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have other allocators")
def test_large_buffers_leave_no_holes_between_smaller_blocks() -> None:
    """A journal is read 2 MiB at a time; a gateway kept 13 MB of such holes behind 60,000 requests."""
    ran = subprocess.run(
        [sys.executable, "-c", CHURN], capture_output=True, text=True, check=True, timeout=stretched(60)
    )
    assert int(ran.stdout) < 4_000  # KiB
