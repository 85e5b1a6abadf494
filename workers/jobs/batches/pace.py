"""How many lines are under way at once: starts at 8, one more per clean round, half on 429 or 503. Pure."""

from __future__ import annotations

FIRST, MOST = 8, 64


class Pace:
    def __init__(self) -> None:
        self.limit = FIRST
        self.round = 0
        """Told at a line's start, given back with its answer: one busy moment refuses many lines and halves once."""
        self._num_clean = 0

    def clean(self) -> None:
        self._num_clean += 1
        if self._num_clean >= self.limit:
            self.limit, self._num_clean = min(self.limit + 1, MOST), 0

    def busy(self, started_in: int) -> None:
        if started_in == self.round:
            self.limit, self._num_clean = max(1, self.limit // 2), 0
            self.round += 1
