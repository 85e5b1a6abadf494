"""Tasks that outlive a request, as a gateway ends."""

from __future__ import annotations

import asyncio

import pytest
from load import stretched

from gateway.base.errors import ApiError
from gateway.base.lifecycle import Detached, background, report_end
from gateway.telemetry.metrics import Metrics
from workers.process import rounds


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


async def test_background_work_that_a_fault_ends_begins_again_within_its_block_and_not_after_it(monkeypatch) -> None:
    monkeypatch.setattr(rounds, "AGAIN_S", 0.01)
    begun = asyncio.Queue[str]()

    async def faulty(name: str) -> None:
        begun.put_nowait(name)
        raise RuntimeError("a fault")

    async with background(faulty, "one"), asyncio.timeout(stretched(10)):
        assert [await begun.get() for _ in range(3)] == ["one"] * 3
    num_begun = begun.qsize()
    await asyncio.sleep(0.1)
    assert begun.qsize() == num_begun


@pytest.mark.parametrize(
    ("error", "counts"),
    [(RuntimeError("a fault"), True), (OSError("away"), False), (ApiError(429, "refused", code="x"), False)],
)
async def test_work_that_outlives_a_request_is_counted_if_a_fault_of_ours_ends_it(
    error: Exception, counts: bool
) -> None:
    async def fails() -> None:
        raise error

    detached, before = Detached(), rounds.num_failed["settle a request"]
    _ = detached.spawn(fails(), "settle a request")
    await detached.join(5.0)
    assert rounds.num_failed["settle a request"] - before == counts
