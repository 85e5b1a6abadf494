"""Prices in force. A price that was read stays until a change is announced, until the version of what SQL knows is another
one (it is read each second), or until the moment at which a price begins or ends.

Without that reading (`saw`) a price is at most 2 s old. The cache keeps its prices while SQL does not answer; it knows no
rates' meaning.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web
from sqlalchemy.exc import SQLAlchemyError

from accounting.database.db import Database
from accounting.prices.prices import price_for
from accounting.values import clock
from accounting.values.types import Price, Tier

MAX_AGE_S = 2.0
CONFIRMED_S = 3.0
"""The time for which one reading of the version speaks for all prices. Two readings may be late."""
MAX_ENTRIES = 100_000

_UNKNOWN = -1
"""The state of a price that SQL was asked for in vain: it is asked again for the next request."""

_Key = tuple[str, str, Tier]


class PricesUnknown(Exception):
    """SQL does not answer and no price is remembered."""


@dataclass(frozen=True, slots=True)
class _Entry:
    price: Price | None
    read_at: float
    state: int
    """The state of the cache before the price was read."""


class PriceCache:
    def __init__(
        self,
        database: Database,
        *,
        clock: Callable[[], float] = time.monotonic,
        now_ms: Callable[[], int] = clock.now_ms,
    ) -> None:
        self._database = database
        self._clock = clock
        self._now_ms = now_ms
        self._entries: dict[_Key, _Entry] = {}
        self._reading: dict[_Key, asyncio.Task[_Entry]] = {}
        self._shared: dict[Price, Price] = {}
        """Each price once: tenants of one sheet have equal ones."""
        self._state = 0
        """A number that rises whenever no price that was read before may be used any more."""
        self._version: int | None = None
        self._changes_at_ms: int | None = None
        self._confirmed_at = -CONFIRMED_S

    async def price(self, tenant_id: str, model: str, tier: Tier) -> Price | None:
        """Returns the price. None means that there is no price, so the request must be refused. Raises
        PricesUnknown.
        """
        key = (tenant_id, model, tier)
        entry = self._entries.get(key)
        if entry is None or not self._is_in_force(entry):
            entry = await self._read_once(key)
        return entry.price

    def saw(self, version: int, changes_at_ms: int | None) -> None:
        """Takes the version of what SQL knows, and the next moment at which a price begins or ends. Another moment than the
        last one says that that one has come, whether a request asked for a price since or not.
        """
        if (version, changes_at_ms) != (self._version, self._changes_at_ms):
            self.forget()
        self._version, self._changes_at_ms = version, changes_at_ms
        self._confirmed_at = self._clock()

    def forget(self) -> None:
        """Forgets all prices, because a change was announced. They serve on while SQL does not answer. A reading under
        way may have begun before the change.
        """
        self._state += 1

    async def close(self) -> None:
        await asyncio.gather(*self._reading.values(), return_exceptions=True)

    def _is_in_force(self, entry: _Entry) -> bool:
        now = self._clock()
        if now - self._confirmed_at > CONFIRMED_S:
            return now - entry.read_at <= MAX_AGE_S
        if self._changes_at_ms is not None and self._now_ms() >= self._changes_at_ms:
            self.forget()
            self._changes_at_ms = None
        return entry.state == self._state

    async def _read_once(self, key: _Key) -> _Entry:
        """Reads a price with one query for many requests; a cancelled request does not cancel the others' query."""
        task = self._reading.get(key)
        if task is None:
            task = self._reading[key] = asyncio.create_task(self._read(key))
            task.add_done_callback(lambda _: self._reading.pop(key, None))
        return await asyncio.shield(task)

    async def _read(self, key: _Key) -> _Entry:
        state = self._state
        try:
            async with self._database.read() as conn:
                price = await price_for(conn, *key, self._now_ms())
        except (SQLAlchemyError, OSError) as reason:
            known = self._entries.get(key)
            if known is None:
                raise PricesUnknown(str(reason)) from reason
            price, state = known.price, _UNKNOWN
        if price is not None:
            price = self._shared.setdefault(price, price)
        self._entries.pop(key, None)
        if len(self._entries) >= MAX_ENTRIES:
            del self._entries[next(iter(self._entries))]
        entry = self._entries[key] = _Entry(price, self._clock(), state)
        return entry


PRICES = web.AppKey("prices", PriceCache)
