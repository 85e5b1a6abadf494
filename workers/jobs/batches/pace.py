"""The number of lines under way at once. It starts at 8, grows by one per round without refusals, and is halved on 429
or 503. The module is pure."""

from __future__ import annotations

FIRST, MOST = 8, 64


class Pace:
    def __init__(self) -> None:
        self.limit = FIRST
        self.round = 0
        """The number of the round. A line keeps it from its start until its answer: one busy moment refuses many lines,
        but halves the limit once."""
        self._num_clean = 0

    def clean(self) -> None:
        self._num_clean += 1
        if self._num_clean >= self.limit:
            self.limit, self._num_clean = min(self.limit + 1, MOST), 0

    def busy(self, started_in: int) -> None:
        if started_in == self.round:
            self.limit, self._num_clean = max(1, self.limit // 2), 0
            self.round += 1
