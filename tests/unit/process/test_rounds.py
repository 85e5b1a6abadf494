from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from workers.process import rounds
from workers.process.rounds import num_failed, repeat, restarted


class Work:
    """Fails in its first rounds with the given errors."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.num_rounds = 0

    async def round(self) -> None:
        self.num_rounds += 1
        if self.failures:
            raise self.failures.pop(0)


async def run_for(seconds: float, *args, **kwargs) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(seconds):
            await repeat(*args, **kwargs)


async def test_a_failed_round_is_told_and_the_next_one_comes() -> None:
    work, told = Work(OSError("away"), ConnectionError("still away")), []
    await run_for(0.3, 0.01, work.round, forgives=(OSError,), on_failure=told.append)
    assert [str(error) for error in told] == ["away", "still away"]
    assert work.num_rounds > 4


async def test_an_error_of_ours_is_counted_and_logged_once_a_minute_and_the_next_round_comes(caplog) -> None:
    work, before = Work(ValueError("a bug"), KeyError("another")), num_failed["Work.round"]
    await run_for(0.3, 0.01, work.round, forgives=(OSError,))
    assert work.num_rounds > 4
    assert num_failed["Work.round"] == before + 2
    [line] = caplog.records
    assert (line.getMessage(), line.work) == ("background_work_failed", "Work.round")
    assert "a bug" in str(line.exc_info[1])


async def test_a_plain_call_is_a_round_and_a_pause_comes_first_or_last() -> None:
    now, later = [], []
    await run_for(0.1, 10, lambda: now.append(time.monotonic()))
    await run_for(0.1, 10, lambda: later.append(time.monotonic()), waits_first=True)
    assert (len(now), later) == (1, [])


async def test_a_cancellation_that_a_round_swallowed_ends_the_work_all_the_same() -> None:
    work = Work()

    async def deaf() -> None:
        await work.round()
        if work.num_rounds == 1:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(10)

    task = asyncio.create_task(repeat(0.0, deaf))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task], timeout=0.2)
    assert task.cancelled()
    assert work.num_rounds == 1


async def test_work_that_a_fault_of_ours_ended_begins_again_later_and_later_until_it_returns(
    caplog, monkeypatch
) -> None:
    waited = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(rounds.asyncio, "sleep", sleep)
    work, before = Work(*(ValueError("a bug") for _ in range(9))), num_failed["Work.round"]
    await restarted(work.round)
    assert (work.num_rounds, num_failed["Work.round"] - before) == (10, 9)
    assert waited == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert {(one.getMessage(), one.work) for one in caplog.records} == {("background_task_failed", "Work.round")}


async def test_work_that_ran_for_long_before_its_fault_begins_again_soon(monkeypatch) -> None:
    waited, now = [], [0.0]

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    async def work() -> None:
        now[0] += 3600
        if len(waited) < 3:
            raise ValueError("a bug")

    monkeypatch.setattr(rounds.asyncio, "sleep", sleep)
    monkeypatch.setattr(rounds.time, "monotonic", lambda: now[0])
    await restarted(work)
    assert waited == [1, 1, 1]


async def test_work_that_was_cancelled_does_not_begin_again_even_if_it_swallowed_that() -> None:
    begun = []

    async def deaf(name: str) -> None:
        begun.append(name)
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            raise ConnectionError("as a library says it") from None

    task = asyncio.create_task(restarted(deaf, name="mine"))
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait([task], timeout=1)
    assert task.cancelled()
    assert begun == ["mine"]
