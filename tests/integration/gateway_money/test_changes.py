"""The auth epoch is read from SQL when somebody has committed, and it is known as of now all the same."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from accounting.database import auth_epoch
from accounting.database.db import Database
from gateway import changes
from gateway.base.running import Running
from gateway.http.auth_epoch import AuthEpoch
from gateway.metering.price_cache import PriceCache


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
