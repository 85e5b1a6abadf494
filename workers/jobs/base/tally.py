"""Counts that the children of a jobs process share with it, in a small file. Children come and go, so none of them can
hold a counter.

The file has one number of eight bytes for each name. It is locked while a number is changed, which happens seldom.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

Counted = Literal["busy", "running", "failed", "fence_reject", "quarantined"]
"""A line is sent again because the gateway is busy, because its key is running, or because it failed. A claim was
lost before a write. A line was given up because it crashed its runner again and again."""
NAMES: Sequence[Counted] = get_args(Counted)
_BYTES = 8


class Tally:
    def __init__(self, path: Path | None) -> None:
        """`path` is None where nobody reads the counts."""
        self._path = path

    def add(self, name: Counted) -> None:
        if self._path is None:
            return
        place = NAMES.index(name) * _BYTES
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            number = int.from_bytes(os.pread(file, _BYTES, place), "little") + 1
            os.pwrite(file, number.to_bytes(_BYTES, "little"), place)
        finally:
            os.close(file)  # this gives up the lock

    def read(self) -> dict[Counted, int]:
        try:
            content = b"" if self._path is None else self._path.read_bytes()
        except FileNotFoundError:
            content = b""
        return {
            name: int.from_bytes(content[place * _BYTES : (place + 1) * _BYTES], "little")
            for place, name in enumerate(NAMES)
        }

    def clear(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)
