"""Disk space that a journal reserves for the case that the disk is full: once released, it lets running requests end.

Gateways and workers each have one, next to their journal. Calls block, so callers use a thread that may wait.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)

BALLAST_BYTES = 64 * 1024 * 1024
NAME = "ballast"


class Ballast:
    def __init__(self, directory: Path, num_bytes: int = BALLAST_BYTES) -> None:
        self._path = directory / NAME
        self._num_bytes = num_bytes
        self.is_held = False
        self._is_told = False

    @property
    def was_left(self) -> bool:
        """True if a process before this one still held the space when it ended."""
        return self._path.exists()

    def take(self) -> bool:
        """Reserves the space. Returns False if the disk has no space for it."""
        if self.is_held:
            return True
        try:
            self._check_room()
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, self._num_bytes)
            finally:
                os.close(descriptor)
        except OSError as failure:
            if not self._is_told:
                log.error("there is no room for the ballast %s: %s", self._path, failure)
            self.give_up()
            self._is_told = True
            return False
        self.is_held, self._is_told = True, False
        return True

    def _check_room(self) -> None:
        """Raises OSError if there is too little space. An attempt that fails would fill the disk while it lasts."""
        disk = os.statvfs(self._path.parent)
        if disk.f_bavail * disk.f_frsize < self._num_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def give_up(self) -> None:
        self.is_held = False
        with contextlib.suppress(OSError):  # the disk may be read-only by now: `take` finds the file later
            self._path.unlink(missing_ok=True)


def is_full(failure: Exception | None) -> bool:
    """Says whether the failure only means that the disk or the quota is full."""
    return isinstance(failure, OSError) and failure.errno in (errno.ENOSPC, errno.EDQUOT)
