"""The memory that this process may still take: what the machine has, and what a container's limits leave of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_V1, _V2 = ("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current")
"""The files of a limit and of what is used, in both versions of cgroups."""


def free_memory(root: Path = Path("/")) -> int | None:
    """Returns bytes, or None where the kernel does not say."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    return min([int(found[1]) * 1024, *_left(root)]) if found else None


def _left(root: Path) -> Iterator[int]:
    """Yields the bytes that each limit leaves: that of the process's own group, and those of the groups around it.
    A container may see its own group as the outermost one, whatever path the kernel names."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        outermost = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        group = outermost / path.lstrip("/")
        for one in (group, *group.parents):
            yield from _left_in(one, _V1 if controllers else _V2)
            if one == outermost:
                break


def _left_in(group: Path, files: tuple[str, str]) -> Iterator[int]:
    limit, used = (_text(group / name).strip() for name in files)
    if limit.isdecimal() and used.isdecimal():
        # Pages of files count as used, and are taken back before anything is killed. MemAvailable has them, too.
        figures = dict(line.split() for line in _text(group / "memory.stat").splitlines())
        of_files = (figures.get(f"total_{name}", figures.get(name, "0")) for name in ("inactive_file", "active_file"))
        yield max(0, int(limit) - int(used) + sum(map(int, of_files)))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
