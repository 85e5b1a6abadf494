"""Disk space that a journal keeps for the day on which the disk is full: given up, it lets running requests end.

Gateways and workers have one each, beside their journal. Blocking; callers bring a thread that may wait.
"""

from __future__ import annotations

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
        """A process before this one held it to its end."""
        return self._path.exists()

    def take(self) -> bool:
        """False: the disk has no room for it."""
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
                log.error("no room for the ballast %s: %s", self._path, failure)
            self.give_up()
            self._is_told = True
            return False
        self.is_held, self._is_told = True, False
        return True

    def _check_room(self) -> None:
        """Raises OSError. An attempt in vain would take all the room there is, for as long as it lasts."""
        disk = os.statvfs(self._path.parent)
        if disk.f_bavail * disk.f_frsize < self._num_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def give_up(self) -> None:
        self.is_held = False
        self._path.unlink(missing_ok=True)


def is_full(failure: Exception | None) -> bool:
    """Nothing is wrong with the disk but that there is no room."""
    return isinstance(failure, OSError) and failure.errno in (errno.ENOSPC, errno.EDQUOT)
