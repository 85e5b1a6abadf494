"""The report of an attempt, which a worker makes when it ends: its timeline, and how much of its prompt was cached.

The module is pure.
"""

from __future__ import annotations

import msgspec

from cache.tree.handle import Handle
from cache.tree.misses import Miss
from workers.protocol.messages import CacheReport, TimelineEvent

MAX_TIMELINE_EVENTS = 256
"""Largest number of events of an attempt's timeline. Even a request that is preempted for ever ends with a frame of
bounded size."""


class AttemptReport:
    def __init__(self, arrived_at: float, num_prompt: int) -> None:
        self.cache = CacheReport()
        self._arrived_at = arrived_at
        self._num_prompt = num_prompt
        self._events: list[TimelineEvent] = []
        self._was_admitted = False

    @property
    def timeline(self) -> tuple[TimelineEvent, ...]:
        return tuple(self._events)

    def event(self, name: str, now: float, step: int = -1, num_tokens: int = 0) -> None:
        """Adds an event to the timeline, which is in the order of time although its callers read different clocks."""
        if len(self._events) < MAX_TIMELINE_EVENTS or name == "finished":
            offset_us = int((now - self._arrived_at) * 1e6)
            if self._events:
                offset_us = max(offset_us, self._events[-1].offset_us)
            self._events.append(TimelineEvent(name, offset_us, step, num_tokens))

    def admitted(self, handle: Handle, evicted_age_ms: int) -> None:
        """Notes what the first admission found in the cache. Its own blocks that a later admission finds again do not
        change the report."""
        if self._was_admitted:
            return
        self._was_admitted = True
        self.cache = CacheReport(
            cached_tokens=min(handle.num_tokens, self._num_prompt),
            public_tokens=min(handle.public_tokens, self._num_prompt),
            miss_reason=handle.miss_reason,
            diverged_at_token=handle.diverged_at_token,
            evicted_age_ms=evicted_age_ms,
        )

    def restored(self, num_tokens: int, miss: Miss) -> None:
        """Notes that more of the prompt was cached than the device had."""
        self.cache = msgspec.structs.replace(
            self.cache,
            cached_tokens=self.cache.cached_tokens + num_tokens,
            miss_reason=miss.reason,
            diverged_at_token=miss.diverged_at_token,
        )

    def pinned(self, num_blocks: int) -> None:
        self.cache = msgspec.structs.replace(self.cache, num_pinned_blocks=num_blocks)
