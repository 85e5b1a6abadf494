"""Tasks that outlive a request, as a gateway ends."""

from __future__ import annotations

import asyncio

import pytest

from gateway.base.lifecycle import Detached, report_end
from gateway.telemetry.metrics import Metrics


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


async def test_the_error_that_ends_a_background_task_is_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    """The journal's reviver and the limiter's upkeep ended without a word."""

    async def fault() -> None:
        raise RuntimeError("a fault")

    task = asyncio.create_task(fault())
    report_end(task)
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert "background_task_failed" in caplog.text
    assert "a fault" in caplog.text
    name = "test_the_error_that_ends_a_background_task_is_logged_and_counted"
    assert f'headgate_background_failures_total{{gateway="0",work="{name}"}} 1.0' in Metrics(0).page("").body.decode()
