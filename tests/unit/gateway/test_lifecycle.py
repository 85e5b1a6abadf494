"""Tasks that outlive a request, as a gateway ends."""

from __future__ import annotations

import asyncio

from gateway.base.lifecycle import Detached


async def test_tasks_that_begin_while_others_are_awaited_are_awaited_too() -> None:
    detached, done = Detached(), []

    async def first() -> None:
        await asyncio.sleep(0.01)
        _ = detached.spawn(second(), "second")

    async def second() -> None:
        await asyncio.sleep(0.01)
        done.append("second")

    _ = detached.spawn(first(), "first")
    await detached.join(5.0)
    assert done == ["second"]


async def test_tasks_that_take_too_long_are_cancelled() -> None:
    detached = Detached()
    task = detached.spawn(asyncio.sleep(3600), "long")
    await detached.join(0.01)
    assert task.cancelled()
