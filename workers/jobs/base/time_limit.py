"""The time limit of a child's work: a child that shows no progress for so long is killed, and the work is begun anew.

Celery's own limits are those of a whole task, and nobody can prolong them. A chunk needs no more, because its runner
gives the rest back after 120 s, but a batch takes as long to validate or finalise as it is large: with a limit of the
whole it was ended at the limit, begun from the start, and ended again. So the limit is of the time between two signs of
progress, such as a line of the output. To go on from a half-written file would be another way: it would need the state
of the hash and of the encryption in SQL, and a limit of the whole would still have to be longer than the last
transaction. This one needs nothing stored, and ends a child that hangs as Celery's did.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

MARK_EVERY_S = 1.0


class TimeLimit:
    """A context manager around a child's work. The timer is the process's: SIGALRM ends it, whatever its threads do."""

    def __init__(self, seconds: float = 0.0, pulse: Path | None = None) -> None:
        """`seconds` is 0 for no limit. Beside the file `pulse`, by which the jobs process hears that its worker receives
        messages, each child at work has a mark of its own, whose time is that until which it need show no progress."""
        self._seconds = seconds
        self._mark = None if pulse is None else pulse.with_suffix(f".{os.getpid()}")
        self._marked_at = 0.0

    def __enter__(self) -> TimeLimit:
        if self._seconds:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        self._begin(self._seconds)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._begin(0.0)
        self._seconds = 0.0  # a thread that goes on has no say in what the child does next
        if self._mark is not None:
            with suppress(OSError):
                self._mark.unlink(missing_ok=True)

    def progress(self, next_s: float = 0.0) -> None:
        """Begins the limit anew. `next_s` prolongs it for a step that shows no progress. Any thread may call it."""
        self._begin(max(self._seconds, next_s))
        now = time.monotonic()
        if self._mark is None or not self._seconds or (not next_s and now - self._marked_at < MARK_EVERY_S):
            return
        self._marked_at = now
        until = time.time() + next_s
        with suppress(OSError):  # without a mark the child may be taken for idle, which is no reason to end its work
            self._mark.touch()
            os.utime(self._mark, (until, until))

    def _begin(self, seconds: float) -> None:
        if self._seconds:
            signal.setitimer(signal.ITIMER_REAL, seconds)


def excused_until(pulse: Path) -> float:
    """Returns until when (a Unix time) children at work need show no progress; 0 if none works. Marks of children that
    died are removed."""
    newest = 0.0
    for mark in pulse.parent.glob(f"{pulse.stem}.[0-9]*"):
        with suppress(OSError):
            if Path(f"/proc/{mark.suffix[1:]}").exists():
                newest = max(newest, mark.stat().st_mtime)
            else:
                mark.unlink()
    return newest
