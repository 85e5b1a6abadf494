"""Bounds the cost of bad keys for the database. Anybody can write a key whose checksum is right, so only the database
knows the good ones. No address may be refused without a lookup, because all clients of a proxy share one address.

While few keys are unknown, each is looked up at once. Beyond that one statement checks the secrets of all waiting keys,
and only genuine keys are looked up: 10^5 unknown keys at once are 200 statements, and a tenant's own key waits for one
or two.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field

from accounting.values.types import Principal

UNKNOWN_BURST = 60
UNKNOWN_PER_S = 1.0
"""The number and the rate of unknown keys that are looked up one by one, over all addresses."""
PAUSE_S = 0.1
"""The pause between two statements if the second one is not full."""
MAX_AT_ONCE = 500
"""The most keys of one statement. Secrets are compared on the loop, in about 5 µs each."""


class LookupFailed(Exception):
    """The database cannot be asked now."""


@dataclass
class _Group:
    keys: set[str] = field(default_factory=set)
    is_asked: bool = False
    genuine: Collection[str] | None = None
    """The genuine keys of the group. None means that they are not known, or that the query failed."""


class KeyLookups:
    """Looks up well-formed keys. There is one per process."""

    def __init__(
        self,
        resolve: Callable[[str], Awaitable[Principal | None]],
        genuine: Callable[[Collection[str]], Awaitable[Collection[str]]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`resolve` returns the rights of one key; `genuine` returns those of many keys that exist. Both raise
        `LookupFailed`.
        """
        self._resolve = resolve
        self._genuine = genuine
        self._clock = clock
        self._full_at = 0.0
        """The time at which unknown keys may again be looked up in a whole burst."""
        self._group = _Group()
        """The group that still takes keys."""
        self._turn = asyncio.Lock()
        self._asked_at = -PAUSE_S

    async def __call__(self, key: str) -> Principal | None:
        """Returns the key's principal, or None if the key is unknown or ended. Raises `LookupFailed`."""
        if not self._begin():
            return await self._resolve(key) if await self._is_genuine(key) else None
        principal = await self._resolve(key)
        if principal is not None:
            self._full_at -= 1 / UNKNOWN_PER_S
        return principal

    def _begin(self) -> bool:
        """Counts a key as unknown until it is found. Returns False if there are too many of them."""
        full_at = max(self._full_at, self._clock()) + 1 / UNKNOWN_PER_S
        if (full_at - self._clock()) * UNKNOWN_PER_S > UNKNOWN_BURST:
            return False
        self._full_at = full_at
        return True

    async def _is_genuine(self, key: str) -> bool:
        """Returns whether the key exists. The first caller of a group asks for the whole group; one group is asked at a
        time.
        """
        group = self._group
        group.keys.add(key)
        if len(group.keys) >= MAX_AT_ONCE:
            self._group = _Group()
        async with self._turn:
            if not group.is_asked:
                await self._ask(group)
        if group.genuine is None:
            raise LookupFailed
        return key in group.genuine

    async def _ask(self, group: _Group) -> None:
        if group is self._group:
            await asyncio.sleep(max(0.0, self._asked_at + PAUSE_S - self._clock()))
        if group is self._group:
            self._group = _Group()
        group.is_asked = True
        self._asked_at = self._clock()
        group.genuine = await self._genuine(group.keys)
