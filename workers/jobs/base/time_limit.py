"""The time limit of a child's work: a child that shows no progress for so long is killed, and the work is begun anew.

Celery's own limits are those of a whole task, and nobody can prolong them. A chunk needs no more, because its runner
gives the rest back after 120 s, but a batch takes as long to validate or finalise as it is large: with a limit of the
whole it was ended at the limit, begun from the start, and ended again. So the limit is of the time between two signs of
progress, such as a line of the output. To go on from a half-written file would be another way: it would need the state
of the hash and of the encryption in SQL, and a limit of the whole would still have to be longer than the last
transaction. This one needs nothing stored, and ends a child that hangs as Celery's did.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import TracebackType

TOUCH_EVERY_S = 1.0


class TimeLimit:
    """A context manager around a child's work. The timer is the process's: SIGALRM ends it, whatever its threads do."""

    def __init__(self, seconds: float = 0.0, pulse: Path | None = None) -> None:
        """`seconds` is 0 for no limit. `pulse` is the file by which the jobs process hears that its children work."""
        self._seconds = seconds
        self._pulse = pulse
        self._touched = 0.0

    def __enter__(self) -> TimeLimit:
        if self._seconds:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        self._begin(self._seconds)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._begin(0.0)

    def progress(self, next_s: float = 0.0) -> None:
        """Begin the limit anew. `next_s` prolongs it for a step that shows no progress. Any thread may call it."""
        self._begin(max(self._seconds, next_s))
        now = time.monotonic()
        if self._pulse is not None and now - self._touched >= TOUCH_EVERY_S:
            self._touched = now
            self._pulse.touch()

    def _begin(self, seconds: float) -> None:
        if self._seconds:
            signal.setitimer(signal.ITIMER_REAL, seconds)
