"""Messages to gateways about the prefix cache: numbered events of whole groups, and snapshots for links that ask for
one.

The module knows links by number. Memory is bounded: a step's changes are sent with the step, and the I/O thread skips a
link that does not read, which shows as a gap. All gateways of a deployment have one key. The key received last is used
for all.
"""

from __future__ import annotations

import logging

from cache.prefix_cache import PrefixCache
from cache.tree.groups import GroupWatch
from workers.protocol.messages import CacheEvent, Message

logger = logging.getLogger(__name__)

MAX_GROUPS_PER_EVENT = 50_000
MAX_SNAPSHOT_GROUPS = 500_000
"""Largest number of groups in a snapshot. They stand for 32 million tokens, in one frame of 9 MB. Further groups are
not reported."""


class CacheFeed:
    def __init__(self, cache: PrefixCache, root: str) -> None:
        self.seq = -1
        self._cache = cache
        self._root = root
        self._key = b""
        self._watch: GroupWatch | None = None
        self._links: dict[int, None] = {}
        self._asked: dict[int, None] = {}

    def subscribe(self, link: int, key: bytes) -> None:
        """Sends a snapshot to the link with the next messages, then all changes."""
        if not key:
            return
        if key != self._key:
            self._begin(key)
        if self._watch is not None:
            self._links.pop(link, None)
            self._asked[link] = None

    def leave(self, link: int) -> None:
        self._links.pop(link, None)
        self._asked.pop(link, None)

    def take(self) -> list[tuple[int, Message]]:
        """Returns the messages for the changes since the last call, in order."""
        if self._watch is None:
            return []
        inserted, evicted = self._watch.take()
        messages: list[tuple[int, Message]] = []
        size = MAX_GROUPS_PER_EVENT
        for start in range(0, max(len(inserted), len(evicted)), size):
            piece = slice(start, start + size)
            self.seq += 1
            event = CacheEvent(self.seq, inserted=tuple(inserted[piece]), evicted=tuple(evicted[piece]))
            messages += [(link, event) for link in self._links]
        if self._asked:
            here = tuple(self._watch.present(MAX_SNAPSHOT_GROUPS))
            snapshot = CacheEvent(self.seq, reset=True, inserted=here)
            messages += [(link, snapshot) for link in self._asked]
            self._links |= self._asked
            self._asked = {}
        return messages

    def _begin(self, key: bytes) -> None:
        try:
            self._watch = self._cache.watch_groups(key, self._root)
        except ValueError as error:
            logger.warning("no cache events: %s", error, extra={"event": "no_cache_events"})
            return
        if self._key:
            logger.warning("another key for group hashes", extra={"event": "cache_events_rekeyed"})
        self._key = key
        self.seq = max(self.seq, 0)
        self._asked |= self._links
        self._links = {}
