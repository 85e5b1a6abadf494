"""What bad keys may cost the database. Anybody can write a key whose checksum is right, so the database alone knows the
good ones; no address may be turned away unasked, because behind a proxy it is everybody's.

While few keys are unknown each is looked up at once. Beyond that one statement checks the secrets of all that wait, and
only genuine keys are looked up: 10^5 unknown keys at once are 200 statements, and a tenant's own key waits for one or two.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field

from accounting.values.types import Principal

UNKNOWN_BURST = 60
UNKNOWN_PER_S = 1.0
"""So many unknown keys are looked up one by one, over all addresses."""
PAUSE_S = 0.1
"""Between two statements of which the latter is not full."""
MAX_AT_ONCE = 500
"""Secrets are compared on the loop, in about 5 µs each."""


class LookupFailed(Exception):
    """The record of truth cannot be asked now."""


@dataclass
class _Group:
    keys: set[str] = field(default_factory=set)
    is_asked: bool = False
    genuine: Collection[str] | None = None
    """None: not known, or the question failed."""


class KeyLookups:
    """Looks up well-formed keys. One per process."""

    def __init__(
        self,
        resolve: Callable[[str], Awaitable[Principal | None]],
        genuine: Callable[[Collection[str]], Awaitable[Collection[str]]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`resolve` asks for all that a key may do, `genuine` which of many keys exist. Both raise `LookupFailed`."""
        self._resolve = resolve
        self._genuine = genuine
        self._clock = clock
        self._full_at = 0.0
        """When unknown keys may again be looked up in a whole burst."""
        self._group = _Group()
        """Still open for keys."""
        self._turn = asyncio.Lock()
        self._asked_at = -PAUSE_S

    async def __call__(self, key: str) -> Principal | None:
        """None: unknown or ended. Raises `LookupFailed`."""
        if not self._begin():
            return await self._resolve(key) if await self._is_genuine(key) else None
        principal = await self._resolve(key)
        if principal is not None:
            self._full_at -= 1 / UNKNOWN_PER_S
        return principal

    def _begin(self) -> bool:
        """Counts a key as an unknown one until it is found, or says no."""
        full_at = max(self._full_at, self._clock()) + 1 / UNKNOWN_PER_S
        if (full_at - self._clock()) * UNKNOWN_PER_S > UNKNOWN_BURST:
            return False
        self._full_at = full_at
        return True

    async def _is_genuine(self, key: str) -> bool:
        """Whoever comes first asks for all of his group, a group at a time."""
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
