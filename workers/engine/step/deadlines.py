"""The deadlines of the attempts that are here. An attempt that ended is not held until its deadline. The module is
pure."""

from __future__ import annotations

import heapq
import math

from workers.engine.queueing.sweeping import swept
from workers.engine.sequences.sequence import Attempt


class Deadlines:
    def __init__(self) -> None:
        self._attempts: dict[int, Attempt] = {}
        """The attempts with a deadline, by serial number."""
        self._heap: list[tuple[float, int]] = []
        """A heap of (deadline, serial number). Entries of attempts that left are skipped, and swept out."""

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, attempt: Attempt) -> None:
        if attempt.deadline < math.inf:
            self._attempts[attempt.serial] = attempt
            heapq.heappush(self._heap, (attempt.deadline, attempt.serial))

    def remove(self, attempt: Attempt) -> None:
        """Forgets an attempt that ended, whether or not it had a deadline."""
        if self._attempts.pop(attempt.serial, None) is not None:
            self._heap = swept(self._heap, len(self._attempts), lambda entry: entry[1] in self._attempts)

    def past(self, now: float) -> list[Attempt]:
        """Returns the attempts whose deadline passed since the last call."""
        past: list[Attempt] = []
        while self._heap and self._heap[0][0] <= now:
            attempt = self._attempts.pop(heapq.heappop(self._heap)[1], None)
            if attempt is not None:
                past.append(attempt)
        return past
