"""What is asked of SQL each moment leaves nothing in reference cycles: the collector comes by seldom, and what waits for
it holds memory meanwhile, with the texts of its parameters."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Awaitable, Callable

from accounting.books import books
from accounting.database.db import Database
from accounting.prices import prices
from accounting.requests import request_postings
from tests.money import NOON_MS, RATES, posting, record

ROUNDS = 3


async def left_in_cycles(work: Callable[[int], Awaitable[object]]) -> Counter[str]:
    """Returns how many objects of SQLAlchemy's statements only the collector can free, after rounds that came before."""
    for number in range(ROUNDS):
        await work(number)
    gc.collect()
    gc.freeze()  # what is left is not looked at again, which takes a second with all tests in this process
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for number in range(ROUNDS, 2 * ROUNDS):
            await work(number)
        gc.collect()
        found = Counter(type(one).__name__ for one in gc.garbage if type(one).__module__.startswith("sqlalchemy.sql"))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        gc.unfreeze()
    return found


async def test_postings_leave_nothing_in_reference_cycles(db: Database) -> None:
    async with db.write() as conn:
        await prices.bootstrap(conn, {"m": {"interactive": RATES}}, 0)

    async def post(number: int) -> None:
        names = [f"req_{number}_{n}" for n in range(3)]
        async with db.write() as conn:
            await request_postings.post(conn, 0, number + 1, [posting(name) for name in names], now_ms=NOON_MS)
        async with db.write() as conn:
            await request_postings.post_engine_records(conn, [record(name) for name in names], now_ms=NOON_MS)

    assert await left_in_cycles(post) == {}


async def test_the_minutes_check_leaves_nothing_in_reference_cycles(db: Database) -> None:
    async with db.write() as conn:
        await prices.bootstrap(conn, {"m": {"interactive": RATES}}, 0)
        await request_postings.post(conn, 0, 1, [posting("req_1")], now_ms=NOON_MS)

    async def check(_: int) -> None:
        async with db.read() as conn:
            assert not (await books.verify_ended(conn, NOON_MS, NOON_MS + 1)).ok  # no engine record

    assert await left_in_cycles(check) == {}
