"""Disks that become full: a real small one, where this process may mount, and one at the boundary of system calls."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PAGE = 4096


@contextlib.contextmanager
def mounted(path: Path, num_bytes: int) -> Iterator[Path]:
    """A file system of its own; skips the test where none may be mounted."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes},mode=700", "tmpfs", str(path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a file system of its own cannot be mounted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def fill(disk: Path) -> Path:
    """Fills the disk to the last byte, as somebody else would; unlinking what is returned makes room."""
    path = disk / "somebody-elses"
    with path.open("ab", buffering=0) as file:
        for size in (1024 * 1024, PAGE, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * size)
    return path


class CountedDisk:
    """All writes below a directory, as if it had `room` bytes left. No mount, no root."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.room = 2**40
        self.is_read_only = False
        """The disk removes no file."""
        self._write, self._unlink = os.write, Path.unlink
        monkeypatch.setattr(os, "write", self.write)
        monkeypatch.setattr(os, "posix_fallocate", self.allocate)
        monkeypatch.setattr(os, "statvfs", self.statvfs)
        monkeypatch.setattr(Path, "unlink", lambda path, *a, **k: self.unlink(path, *a, **k))

    def write(self, file: int, data: Any) -> int:
        if not self._is_below(Path(os.readlink(f"/proc/self/fd/{file}"))):
            return self._write(file, data)
        if self.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        num_written = self._write(file, data[: self.room])
        self.room -= num_written
        return num_written

    def allocate(self, file: int, _: int, num_bytes: int) -> None:
        if num_bytes > self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(file, num_bytes)
        self.room -= num_bytes

    def statvfs(self, _: Any) -> os.statvfs_result:
        return os.statvfs_result((1, 1, 0, 0, max(0, self.room), 0, 0, 0, 0, 255))

    def unlink(self, path: Path, *args: Any, **kwargs: Any) -> None:
        if self._is_below(path) and self.is_read_only:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        if self._is_below(path) and path.exists():
            self.room += path.stat().st_size
        self._unlink(path, *args, **kwargs)

    def _is_below(self, path: Path) -> bool:
        return self.directory in path.parents
