"""Prices in memory: used until something changed, and never longer."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from gateways import MODEL, prepare_home
from sqlalchemy import event, text

from accounting.database.auth_epoch import auth_epoch
from accounting.database.db import Database
from accounting.lifecycle.bootstrap import EXAMPLE_RATES
from accounting.prices import prices
from gateway.metering.price_cache import CONFIRMED_S, MAX_AGE_S, PriceCache

HOUR_MS = 3_600_000


class World:
    """A database with prices, a cache before it, and a clock."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.now_s = 1_000.0
        self.now_ms = 2_000_000_000_000
        self.cache = PriceCache(database, clock=lambda: self.now_s, now_ms=lambda: self.now_ms)
        self.num_reads = 0
        event.listen(database._readers.sync_engine, "begin", self._count)

    def _count(self, _: Any) -> None:
        self.num_reads += 1

    async def version(self) -> str:
        """The version of the price that a request would pay, as the cache says."""
        found = await self.cache.price("proj_any", MODEL, "interactive")
        assert found is not None
        return found.version

    async def looked(self) -> None:
        """What each second brings."""
        async with self.database.read() as conn:
            version = await auth_epoch(conn)
            changes_at_ms = await prices.next_change_ms(conn, self.now_ms)
        self.cache.saw(version, changes_at_ms)

    async def add(self, from_ms: int) -> str:
        rates = {(MODEL, tier): rate for tier, rate in EXAMPLE_RATES.items()}
        async with self.database.write() as conn:
            return await prices.add_version(conn, prices.DEFAULT_SHEET, rates, from_ms)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    url = f"sqlite+aiosqlite:///{tmp_path / 'headgate.db'}"
    await prepare_home(tmp_path, url)
    async with contextlib.AsyncExitStack() as stack:
        database = Database(url)
        stack.push_async_callback(database.close)
        yield World(database)


async def test_a_price_is_read_once_while_nothing_changes(world: World) -> None:
    await world.looked()
    first = await world.version()
    before = world.num_reads
    for _ in range(5):
        world.now_s += 1
        world.cache.saw(await _epoch(world), None)
        assert await world.version() == first
    assert world.num_reads == before + 5  # the readings of the epoch alone


async def test_a_new_price_counts_from_the_next_look_on(world: World) -> None:
    await world.looked()
    first = await world.version()
    second = await world.add(world.now_ms - 1)
    assert await world.version() == first
    await world.looked()
    assert await world.version() == second != first


async def test_an_announcement_counts_at_once(world: World) -> None:
    await world.looked()
    await world.version()
    second = await world.add(world.now_ms - 1)
    world.cache.forget()
    assert await world.version() == second


async def test_a_price_that_begins_later_counts_from_its_moment_on_without_a_look(world: World) -> None:
    first = await world.version()
    second = await world.add(world.now_ms + HOUR_MS)
    await world.looked()
    assert await world.version() == first
    world.now_ms += HOUR_MS - 1
    assert await world.version() == first
    world.now_ms += 1
    assert await world.version() == second


async def test_a_price_that_began_while_nobody_asked_counts_for_the_next_request(world: World) -> None:
    """The look behind its moment names the moment after it, and nothing else says that this one has come."""
    first = await world.version()
    second, third = await world.add(world.now_ms + HOUR_MS), await world.add(world.now_ms + 3 * HOUR_MS)
    await world.looked()
    assert await world.version() == first
    for version in (second, second, third):
        world.now_ms += HOUR_MS
        await world.looked()
        assert await world.version() == version


async def test_without_looks_a_price_is_two_seconds_old_at_most(world: World) -> None:
    await world.looked()
    first = await world.version()
    second = await world.add(world.now_ms - 1)
    world.now_s += CONFIRMED_S
    assert await world.version() == first
    world.now_s += MAX_AGE_S
    assert await world.version() == second


async def test_the_last_price_serves_while_sql_does_not_answer_and_not_after_it(world: World) -> None:
    await world.looked()
    first = await world.version()
    second = await world.add(world.now_ms - 1)
    await world.looked()
    async with world.database.write() as conn:
        await conn.execute(text("ALTER TABLE price_rate RENAME TO gone"))
    assert await world.version() == first
    async with world.database.write() as conn:
        await conn.execute(text("ALTER TABLE gone RENAME TO price_rate"))
    assert await world.version() == second


async def _epoch(world: World) -> int:
    async with world.database.read() as conn:
        return await auth_epoch(conn)
