"""Says how many tries of webhooks may begin, and which queues have to wait: receivers that hang hold up nobody else.

It is pure: times are arguments. Nothing is stored; each jobs process learns for itself which queues have slow receivers:
a tenant's own may be slow, and the operator's that hear of it quick, or the other way round.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from accounting.events.deliveries import Queue

AT_ONCE = 64
"""The most tries of less than `SLOW_S` seconds at once in one jobs process, over all queues."""
SLOW_S = 1.0
"""A try that takes longer has a slow receiver and makes room for another one."""
HELD = 256
"""The most tries at once, slow ones included."""
HELD_BY_SLOW = 128
"""While tries of lately slow queues hold this many places, no such queue begins another. One claim may exceed it by
`AT_ONCE`. The other places are for queues that were not slow."""
LATELY_S = 600.0


@dataclass(frozen=True, eq=False)
class Try:
    queue: Queue
    began: float


class Places:
    """The tries under way of one jobs process."""

    def __init__(self) -> None:
        self._under_way: set[Try] = set()
        self._unanswered: set[Try] = set()
        self._slow_until: dict[Queue, float] = {}

    def begin(self, queue: Queue, now: float) -> Try:
        """Takes a place. Each needs one `answered` and one `end`."""
        begun = Try(queue, now)
        self._under_way.add(begun)
        self._unanswered.add(begun)
        return begun

    def answered(self, begun: Try, now: float) -> None:
        """The receiver has answered or has failed. To write that down takes time, too, which is not the receiver's."""
        self._unanswered.remove(begun)
        if now - begun.began > SLOW_S:
            self._slow_until[begun.queue] = now + LATELY_S

    def end(self, begun: Try) -> None:
        self._under_way.remove(begun)

    def room(self, now: float) -> int:
        """Returns how many tries may begin now."""
        num_quick = sum(now - one.began < SLOW_S for one in self._under_way)
        return min(AT_ONCE - num_quick, HELD - len(self._under_way))

    def shut_out(self, now: float) -> Collection[Queue]:
        """Returns the queues that may begin nothing now."""
        self._slow_until = {queue: until for queue, until in self._slow_until.items() if until > now}
        slow = self._slow_until.keys() | {one.queue for one in self._unanswered if now - one.began > SLOW_S}
        return slow if sum(one.queue in slow for one in self._under_way) >= HELD_BY_SLOW else ()
