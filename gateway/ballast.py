"""Disk space that a journal keeps for the day on which the disk is full: given up, it lets running requests end.

Blocking; callers bring a thread.
"""

from __future__ import annotations

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

    def take(self) -> bool:
        """False: the disk has no room for it."""
        if self.is_held:
            return True
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, self._num_bytes)
            finally:
                os.close(descriptor)
        except OSError as failure:
            log.error("no room for the ballast %s: %s", self._path, failure)
            self.give_up()
            return False
        self.is_held = True
        return True

    def give_up(self) -> None:
        self.is_held = False
        self._path.unlink(missing_ok=True)
