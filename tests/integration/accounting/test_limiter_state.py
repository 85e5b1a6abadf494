"""Incidents that several gateways raise at one time, in both dialects."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database.db import Database
from accounting.limits import limiter_state
from accounting.limits.limiter_state import Running

SLOT, LATE_MS = 0, 1_000


async def starts(conn: AsyncConnection) -> bool:
    return await limiter_state.join(conn, SLOT, 9_000) == 3


async def lists_late(conn: AsyncConnection) -> bool:
    held = [Running("req_1", SLOT, "proj_1", 1, b"")]
    return not await limiter_state.list_running(conn, SLOT, 1, held, 9_000, LATE_MS)


@pytest.mark.parametrize("asks", [starts, lists_late])
async def test_a_gateway_that_missed_an_epoch_has_every_state_built_anew_whoever_raises_one_meanwhile(
    db: Database, asks: Callable[[AsyncConnection], Awaitable[bool]]
) -> None:
    """Both take the same number. States that were built without its requests would stay if it raised none."""
    async with db.write() as conn:
        assert await limiter_state.join(conn, SLOT, 1) == 0
        await limiter_state.raise_for_life(conn, "a", 2)

    async def ask() -> bool:
        async with db.write() as conn:
            return await asks(conn)

    async with db.write() as conn:
        await limiter_state.raise_for_tenants(conn, {"proj_2": 1}, 3)
        asking = asyncio.create_task(ask())
        await asyncio.sleep(0.3)  # on PostgreSQL it has read the last number by then, and waits for this transaction
    assert await asking
    async with db.read() as conn:
        assert await limiter_state.epochs(conn) == {None: 3}
