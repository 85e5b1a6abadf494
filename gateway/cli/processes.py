"""The state of a process of this machine, as the kernel tells it: since when it runs, its memory, its processor time."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_STARTED, _USER, _SYSTEM = 19, 11, 12
"""Places in /proc/PID/stat after the name."""


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    started_at: float
    """Unix seconds."""
    memory_bytes: int
    """Its share of all memory: what several processes have in common is divided among them."""
    cpu_s: float


def look(pid: int) -> Process | None:
    """Returns what is known of a process, or None if it does not run."""
    try:
        after_name = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        if after_name[0] == "Z":
            return None
        up_s = float((_PROC / "uptime").read_text().split()[0])
    except (OSError, IndexError, ValueError):
        return None
    age_s = up_s - int(after_name[_STARTED]) / _TICKS_PER_S
    cpu_s = (int(after_name[_USER]) + int(after_name[_SYSTEM])) / _TICKS_PER_S
    return Process(pid, time.time() - age_s, _memory_bytes(pid), cpu_s)


def children(pid: int) -> list[int]:
    """Returns the living processes that a process has started, and those that they have started."""
    parents: dict[int, list[int]] = {}
    for directory in _PROC.iterdir():
        if directory.name.isdigit():
            try:
                after_name = (directory / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents.setdefault(int(after_name[1]), []).append(int(directory.name))
    found, open_pids = [], [pid]
    while open_pids:
        below = parents.get(open_pids.pop(), [])
        found += below
        open_pids += below
    return sorted(found)


def _memory_bytes(pid: int) -> int:
    for file, name in (("smaps_rollup", "Pss:"), ("status", "VmRSS:")):
        try:
            lines = (_PROC / str(pid) / file).read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    return 0
