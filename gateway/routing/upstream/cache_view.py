"""What one worker's prefix cache holds, by group hash, as far as this gateway has heard. Pure.

Lives and dies with the link, so nothing of a dead worker is ever asked. A hash has the caller's namespace in it
(cache/tree/hashing.py): another tenant's tokens are other hashes. A wrong guess costs time, never correctness.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable, Sequence

from workers.protocol.messages import CacheEvent

MAX_GROUPS = 500_000
"""About 70 MB; the rest of a larger cache is not known here."""
MAX_ASSUMED = 50_000

Group = tuple[bytes, int]
"""(hash, end token)."""


class CacheView:
    def __init__(self, max_groups: int = MAX_GROUPS) -> None:
        self.seq = -1
        """Of the last event; -1: nothing is known until a snapshot comes."""
        self._max_groups = max_groups
        self._reported: set[bytes] = set()
        self._assumed: dict[bytes, float] = {}
        self._due: deque[tuple[float, tuple[bytes, ...]]] = deque()

    def __len__(self) -> int:
        return len(self._reported)

    def apply(self, event: CacheEvent) -> bool:
        """False: events were lost, and a snapshot is needed. Without one nothing is known."""
        if event.reset:
            self._reported = set()
        elif self.seq < 0:
            return True  # it is asked for already
        elif event.seq != self.seq + 1:
            self.seq = -1
            self._reported = set()
            return False
        self.seq = event.seq
        self._reported.difference_update(event.evicted)
        room = self._max_groups - len(self._reported)
        self._reported.update(event.inserted[: max(0, room)])
        return True

    def assume(self, groups: Iterable[Group], until: float, now: float) -> None:
        """A request with these groups was just sent there: they will be found and held, or computed."""
        self._expire(now)
        sent = tuple(group for group, _ in groups)
        if sent and len(self._assumed) + len(sent) <= MAX_ASSUMED:
            self._assumed.update(dict.fromkeys(sent, until))
            self._due.append((until, sent))

    def num_tokens(self, groups: Sequence[Group], now: float) -> int:
        """How many tokens of a prompt are there. O(log groups): a tree loses its leaves first, so whoever holds a group
        holds those before it."""
        self._expire(now)
        held = bisect.bisect_left(groups, True, key=lambda group: not self._holds(group[0]))
        return groups[held - 1][1] if held else 0

    def _holds(self, group: bytes) -> bool:
        return group in self._reported or group in self._assumed

    def _expire(self, now: float) -> None:
        # Not sorted by time: what is late behind something later leaves a little later.
        while self._due and self._due[0][0] <= now:
            for group in self._due.popleft()[1]:
                if self._assumed.get(group, now + 1) <= now:
                    del self._assumed[group]
