"""Prices in force, at most 2 s old. The cache keeps its prices while SQL does not answer; it knows no
rates' meaning.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy.exc import SQLAlchemyError

from accounting.database.db import Database
from accounting.prices.prices import price_for
from accounting.values import clock
from accounting.values.types import Price, Tier

MAX_AGE_S = 2.0
MAX_ENTRIES = 10_000

_Key = tuple[str, str, Tier]


class PricesUnknown(Exception):
    """SQL does not answer and no price is remembered."""


@dataclass(frozen=True)
class _Entry:
    price: Price | None
    read_at: float


class PriceCache:
    def __init__(self, database: Database, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._clock = clock
        self._entries: dict[_Key, _Entry] = {}
        self._reading: dict[_Key, asyncio.Task[_Entry]] = {}

    async def price(self, tenant_id: str, model: str, tier: Tier) -> Price | None:
        """Returns the price. None means that there is no price, so the request must be refused. Raises
        PricesUnknown.
        """
        key = (tenant_id, model, tier)
        entry = self._entries.get(key)
        if entry is None or self._clock() - entry.read_at > MAX_AGE_S:
            entry = await self._read_once(key)
        return entry.price

    async def close(self) -> None:
        await asyncio.gather(*self._reading.values(), return_exceptions=True)

    async def _read_once(self, key: _Key) -> _Entry:
        """Reads a price with one query for many requests; a cancelled request does not cancel the others' query."""
        task = self._reading.get(key)
        if task is None:
            task = self._reading[key] = asyncio.create_task(self._read(key))
            task.add_done_callback(lambda _: self._reading.pop(key, None))
        return await asyncio.shield(task)

    async def _read(self, key: _Key) -> _Entry:
        try:
            async with self._database.read() as conn:
                price = await price_for(conn, *key, clock.now_ms())
        except (SQLAlchemyError, OSError) as reason:
            known = self._entries.get(key)
            if known is None:
                raise PricesUnknown(str(reason)) from reason
            price = known.price
        if len(self._entries) >= MAX_ENTRIES:
            self._entries.clear()
        entry = self._entries[key] = _Entry(price, self._clock())
        return entry
