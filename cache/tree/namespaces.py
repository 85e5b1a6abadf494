"""The isolation of the tree: the region of a namespace path in which each block of a prompt lies.

The gateway makes a path from the authenticated key: the public region first, then the tenant's own. This module only
rounds the ends and obeys: it knows neither tenants nor registered prompts, and a region id is 16 opaque bytes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

UNBOUNDED = sys.maxsize


@dataclass(frozen=True, slots=True)
class PathEntry:
    """One region of a path. `end` is the first token outside of it. It is -1 in the last entry, and only there."""

    region: bytes
    end: int


NamespacePath = tuple[PathEntry, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """A path entry in whole blocks: the region goes on until block `end`, exclusive."""

    region: bytes
    end: int


def segments(path: NamespacePath, block_size: int) -> tuple[Segment, ...]:
    """Returns the path in blocks, each end rounded down. O(entries).

    Law 5 says that regions never step back. A path that returned to a region it had left would put one tenant's blocks
    on both sides of a boundary, so it is refused here, before anything walks the tree. Raises ValueError.
    """
    if not path or path[-1].end != -1:
        raise ValueError(f"a namespace path ends with one open entry (end -1): {path!r}")
    if len({entry.region for entry in path}) != len(path):
        raise ValueError(f"a namespace path never returns to a region: {path!r}")
    previous = 0
    for entry in path[:-1]:
        if entry.end < previous:
            raise ValueError(f"the ends of a namespace path never fall: {path!r}")
        previous = entry.end
    return (
        *(Segment(entry.region, entry.end // block_size) for entry in path[:-1]),
        Segment(path[-1].region, UNBOUNDED),
    )
