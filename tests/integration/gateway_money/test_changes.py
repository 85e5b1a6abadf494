"""The auth epoch is read from SQL when somebody has committed, and it is known as of now all the same."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from accounting.database import auth_epoch
from accounting.database.db import Database
from accounting.lifecycle.bootstrap import EXAMPLE_RATES
from accounting.prices import prices
from accounting.values import clock
from gateway import changes
from gateway.base.running import Running
from gateway.http.auth_epoch import AuthEpoch
from gateway.metering.price_cache import PriceCache

RATES = {("m", tier): rate for tier, rate in EXAMPLE_RATES.items()}


class Counted(Database):
    """A database that counts its snapshots."""

    num_reads = 0

    @contextlib.asynccontextmanager
    async def read(self):
        self.num_reads += 1
        async with super().read() as conn:
            yield conn


class Rounds:
    """An authenticator that only hears of the epoch."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def saw_epoch(self, number: int) -> None:
        self.seen.append(number)


async def until(condition) -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("waited in vain")


async def test_the_epoch_is_read_again_only_after_a_commit(sqlite_books, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "EPOCH_EVERY_S", 0.005)
    database, epoch, rounds = Counted(sqlite_books.url), AuthEpoch(), Rounds()
    pulling = changes.pull_epoch(database, epoch, rounds, PriceCache(database), Running())
    task = asyncio.create_task(pulling)
    try:
        await until(lambda: len(rounds.seen) >= 10)
        assert database.num_reads == 1
        first = epoch.number
        async with sqlite_books.write() as conn:
            await auth_epoch.record(conn, "adapter.created", actor="cli", now=1)
        await until(lambda: epoch.number != first)
        assert (epoch.number, database.num_reads) == (first + 1, 2)
        assert set(rounds.seen) <= {first, first + 1}
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await database.close()


async def test_a_clock_that_is_set_back_has_its_next_price_again(sqlite_books, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "EPOCH_EVERY_S", 0.005)
    now_ms = clock.now_ms()
    moments = [now_ms + 10_000_000, now_ms + 20_000_000]
    async with sqlite_books.write() as conn:
        for moment in moments:
            await prices.add_version(conn, prices.DEFAULT_SHEET, RATES, moment)
    seen: list[int | None] = []
    cache = PriceCache(sqlite_books)
    monkeypatch.setattr(cache, "saw", lambda version, changes_at_ms: seen.append(changes_at_ms))
    monkeypatch.setattr(clock, "now_ms", lambda: now_ms)
    task = asyncio.create_task(changes.pull_epoch(sqlite_books, AuthEpoch(), Rounds(), cache, Running()))
    try:
        for at_ms, following in [
            (now_ms, moments[0]),
            (moments[0], moments[1]),
            (moments[1], None),
            (now_ms, moments[0]),
        ]:
            now_ms = at_ms
            await until(lambda following=following: seen[-1:] == [following])
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
