"""Shows whether a process's loop turns, and its work gets on: to its supervisor by a beat each second, and in the log by the
stack of a loop that stands still.

A beat adds 1 to a descriptor that the process has inherited (eventfd(2)), so that neither side ever waits. A thread
looks at the beats every two seconds. This module does not know what the loop does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

logger = logging.getLogger(__name__)

BEAT_S = 1.0
BLOCKED_S = 1.0
"""How late a beat is when the loop's stack is logged. A full garbage collection takes 0.1 s, and a loop on a busy machine waits
some tenths of a second for a core: a stack would tell nothing about either. `headgate_event_loop_lag_seconds` has them.
"""
LOG_EVERY_S = 60.0
MAX_FRAMES = 16


class Heartbeat:
    """The beats of the loop that runs when `begin` is called, until `end`."""

    def __init__(
        self,
        fd: int | None = None,
        is_well: Callable[[], bool] = lambda: True,
        *,
        beat_s: float = BEAT_S,
        blocked_s: float = BLOCKED_S,
    ) -> None:
        """`fd` is the descriptor of the supervisor; without one the loop is only watched for the log. `is_well` says
        whether the process does its work: while it does not, there are no beats although the loop turns.
        """
        self._fd = fd
        self._is_well = is_well
        self._beat_s = beat_s
        self._blocked_s = blocked_s
        self._timer: asyncio.TimerHandle | None = None
        self._beaten_at = 0.0
        self._has_ended = threading.Event()

    def begin(self) -> None:
        self._beat()
        thread = threading.get_ident()
        threading.Thread(target=self._watch, args=(thread,), name="heartbeat", daemon=True).start()

    def end(self) -> None:
        """It may be called without `begin`."""
        self._has_ended.set()
        if self._timer is not None:
            self._timer.cancel()

    def _beat(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._beat_s, self._beat)
        self._beaten_at = time.monotonic()
        if self._is_well() and self._fd is not None:
            os.eventfd_write(self._fd, 1)

    def _watch(self, thread: int) -> None:
        wait_s = self._beat_s + self._blocked_s
        due, used_s = time.monotonic() + wait_s, time.process_time()
        while not self._has_ended.wait(wait_s):
            now, used_before_s, used_s = time.monotonic(), used_s, time.process_time()
            late_s = now - self._beaten_at - self._beat_s
            # A process that was stopped, or had no core, shows it by a thread that is late and time that was not used.
            # One whose loop holds the interpreter's lock for long, as a regular expression does, has used its time.
            had_no_core = now - due > self._blocked_s / 2 and used_s - used_before_s < self._blocked_s / 2
            if late_s < self._blocked_s:
                wait_s = self._blocked_s - late_s
            elif had_no_core:
                wait_s = self._blocked_s
            else:
                frame = sys._current_frames().get(thread)
                logger.warning("loop_blocked", extra={"late_s": round(late_s, 1), "at": places(frame)})
                wait_s = LOG_EVERY_S
            due = now + wait_s


def places(frame: FrameType | None) -> list[str]:
    """Returns the innermost places of a stack, outermost first. Source lines and locals may hold a prompt."""
    found: list[str] = []
    while frame is not None and len(found) < MAX_FRAMES:
        found.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return found[::-1]
