"""The content of one worker's prefix cache, by group hash, as far as this gateway has heard. The module is pure.

A view belongs to one link and ends with it, so nothing of a dead worker is used. A hash contains the caller's namespace
(cache/tree/hashing.py): another tenant's tokens have other hashes. A wrong guess costs time, never correctness.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable, Sequence

from workers.protocol.messages import CacheEvent

MAX_GROUPS = 500_000
"""About 70 MB. The rest of a larger cache is not known here."""
MAX_ASSUMED = 50_000

Group = tuple[bytes, int]
"""The hash and the end token."""


class CacheView:
    def __init__(self, max_groups: int = MAX_GROUPS) -> None:
        self.seq = -1
        """The number of the last event; -1 means that nothing is known until a snapshot comes."""
        self._max_groups = max_groups
        self._reported: set[bytes] = set()
        self._assumed: dict[bytes, float] = {}
        self._due: deque[tuple[float, tuple[bytes, ...]]] = deque()

    def __len__(self) -> int:
        return len(self._reported)

    def apply(self, event: CacheEvent) -> bool:
        """Applies one event. Returns False if events were lost and a snapshot is needed; nothing is known until it
        comes.
        """
        if event.reset:
            self._reported = set()
        elif self.seq < 0:
            return True  # the snapshot is asked for already
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
        """Notes that a request with these groups was just sent there. The worker will find and hold them, or compute
        them.
        """
        self._expire(now)
        sent = tuple(group for group, _ in groups)
        if sent and len(self._assumed) + len(sent) <= MAX_ASSUMED:
            self._assumed.update(dict.fromkeys(sent, until))
            self._due.append((until, sent))

    def num_tokens(self, groups: Sequence[Group], now: float) -> int:
        """Returns how many tokens of a prompt are cached. O(log groups): a tree loses its leaves first, so a worker
        that holds a group also holds the groups before it.
        """
        self._expire(now)
        held = bisect.bisect_left(groups, True, key=lambda group: not self._holds(group[0]))
        return groups[held - 1][1] if held else 0

    def _holds(self, group: bytes) -> bool:
        return group in self._reported or group in self._assumed

    def _expire(self, now: float) -> None:
        # The queue is not sorted by time: an early entry that comes after a later one leaves a little late.
        while self._due and self._due[0][0] <= now:
            for group in self._due.popleft()[1]:
                if self._assumed.get(group, now + 1) <= now:
                    del self._assumed[group]
