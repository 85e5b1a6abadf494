"""The beats of a child (`workers/process/heartbeat.py`), as its supervisor counts them."""

from __future__ import annotations

import os

LOOK_S = 5.0
MAX_SILENT = 3
"""The looks in a row without a beat after which a child is hung: a beat is due each second, so it has stood still for
15 s (security.md F10 and F27). Several looks, because one tells less: the supervisor's may have come too soon.
"""


class Heartbeats:
    """The beats of one process. One that has not begun to beat is not hung: it loads a model, for example."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._has_begun = False
        self._num_silent = 0

    def look(self) -> bool:
        """Counts the beats since the last look. Returns whether the process is hung."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            self._num_silent += self._has_begun
        else:
            self._has_begun, self._num_silent = True, 0
        return self._num_silent >= MAX_SILENT

    def forgive(self) -> None:
        """Forgets the silence until now, because whoever looked had no core itself."""
        self._num_silent = 0

    def close(self) -> None:
        os.close(self.fd)
