"""S5: what keys that anybody can make up cost the database, and what they cost those who have a real one."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import pytest

from accounting.values.types import Principal
from gateway.http.key_lookups import MAX_AT_ONCE, UNKNOWN_BURST, KeyLookups, LookupFailed

GOOD = Principal(kind="tenant", tenant_id="t", key_id="k", scopes=frozenset({"chat"}))


class Table:
    """Keys in a database that counts what it is asked."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.num_statements = 0
        self.is_down = False
        self.lookups = KeyLookups(self._resolve, self._genuine, lambda: self.now)

    async def _resolve(self, key: str) -> Principal | None:
        self._count()
        return GOOD if key.startswith("good") else None

    async def _genuine(self, keys: Collection[str]) -> Collection[str]:
        self._count()
        await asyncio.sleep(0)
        return {key for key in keys if key.startswith("good")}

    def _count(self) -> None:
        self.num_statements += 1
        if self.is_down:
            raise LookupFailed

    async def spend_the_burst(self) -> None:
        for i in range(UNKNOWN_BURST):
            assert await self.lookups(f"bad {i}") is None
        assert self.num_statements == UNKNOWN_BURST
        self.num_statements = 0


@pytest.mark.rest
async def test_s5_a_hundred_thousand_unknown_keys_cost_less_than_a_hundredth_of_it() -> None:
    table = Table()
    attempts = 100_000
    asked = [asyncio.create_task(table.lookups(f"unknown {i}")) for i in range(attempts)]
    mine = asyncio.create_task(table.lookups("good"))
    assert set(await asyncio.gather(*asked)) == {None}
    assert await mine is GOOD
    assert table.num_statements <= attempts / 100


async def test_s5_one_after_another_they_wait_and_a_real_key_is_found_among_them() -> None:
    table = Table()
    await table.spend_the_burst()
    together = await asyncio.gather(*(table.lookups(f"unknown {i}") for i in range(40)), table.lookups("good"))
    assert together == [None] * 40 + [GOOD]
    # One for the first, one for all who came while it was asked, one for all that the real key may do.
    assert table.num_statements <= 3


async def test_real_keys_use_up_nothing() -> None:
    table = Table()
    for i in range(UNKNOWN_BURST * 3):
        assert await table.lookups(f"good {i}") is GOOD
    assert table.num_statements == UNKNOWN_BURST * 3
    table.num_statements = 0
    await table.spend_the_burst()


async def test_after_a_while_unknown_keys_are_looked_up_at_once_again() -> None:
    table = Table()
    await table.spend_the_burst()
    table.now += UNKNOWN_BURST
    await table.spend_the_burst()


async def test_a_database_that_is_away_fails_all_who_wait_and_nobody_after_them() -> None:
    table = Table()
    await table.spend_the_burst()
    table.is_down = True
    asked = [table.lookups(f"good {i}") for i in range(MAX_AT_ONCE + 1)]
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(one, LookupFailed) for one in found)
    assert table.num_statements == 2
    table.is_down = False
    assert await table.lookups("good") is GOOD


async def test_who_gives_up_while_he_asks_for_others_leaves_it_to_them() -> None:
    table = Table()
    await table.spend_the_burst()
    await table.lookups("unknown")  # whoever comes now waits for a moment
    first = asyncio.create_task(table.lookups("good one"))
    second = asyncio.create_task(table.lookups("good two"))
    await asyncio.sleep(0.02)
    first.cancel()
    assert await second is GOOD
    with pytest.raises(asyncio.CancelledError):
        await first
