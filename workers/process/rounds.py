"""Work that a process does again and again, and the wait in between."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ParamSpec

logger = logging.getLogger(__name__)

P = ParamSpec("P")

LOG_EVERY_S = 60.0
AGAIN_S, MAX_AGAIN_S = 1.0, 60.0
"""The time after which work begins again that a fault of ours ended: at first, and at most, if that happens again and again."""
num_failed: Counter[str] = Counter()
"""Failures of this process' background work that nobody foresaw, by the function that was called. 0 before the first one. A process has one
table, because work is begun in places that know of no metrics."""


async def repeat(
    every_s: float,
    work: Callable[[], Awaitable[object] | None],
    *,
    forgives: tuple[type[Exception], ...] = (),
    on_failure: Callable[[Exception], None] | None = None,
    waits_first: bool = False,
) -> None:
    """Does a round of work, waits `every_s` seconds, and so on until the task is cancelled. A round that fails is left to
    the next one: an error of `forgives` is told to `on_failure`, any other one is a fault of ours, which is counted and
    logged. A cancellation ends the task even if the round swallowed it (`heed_cancellation`).
    """
    name, logged_at = name_of(work), -LOG_EVERY_S
    num_failed[name] += 0
    if waits_first:
        await asyncio.sleep(every_s)
    while True:
        try:
            if (round := work()) is not None:
                await round
        except forgives as failure:
            if on_failure is not None:
                on_failure(failure)
        except Exception as failure:  # one failed round must not be the last one
            num_failed[name] += 1
            if time.monotonic() - logged_at >= LOG_EVERY_S:
                logged_at = time.monotonic()
                logger.error("background_work_failed", exc_info=failure, extra={"work": name})
        heed_cancellation()
        await asyncio.sleep(every_s)


async def restarted(work: Callable[P, Coroutine[Any, Any, None]], *args: P.args, **options: P.kwargs) -> None:
    """Runs `work(*args, **options)` until it returns or the task is cancelled. An error that ends it is a fault of ours: it
    is counted and logged, and the work begins again, from its start. So it must be work that may begin again.
    """
    name, again_s = name_of(work), AGAIN_S
    num_failed[name] += 0
    while True:
        began = time.monotonic()
        try:
            return await work(*args, **options)
        except Exception as failure:  # other work goes on, and this one must not be missing until the process ends
            num_failed[name] += 1
            logger.error("background_task_failed", exc_info=failure, extra={"work": name})
        heed_cancellation()
        if time.monotonic() - began > MAX_AGAIN_S:
            again_s = AGAIN_S
        await asyncio.sleep(again_s)
        again_s = min(2 * again_s, MAX_AGAIN_S)


async def within(event: asyncio.Event, seconds: float) -> bool:
    """Waits for an event, `seconds` at most. Returns whether it came."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


def heed_cancellation() -> None:
    """Raises the cancellation that a library has swallowed: the caller must end. redis-py takes one for a failed
    connection, or, under Python 3.11, loses one that comes just as a command was sent (`asyncio.wait_for`).
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def name_of(work: object) -> str:
    """Returns the name of a function or coroutine, for a log line or a label. What is made within a function has that
    function's name.
    """
    return str(getattr(work, "__qualname__", type(work).__qualname__)).partition(".<locals>")[0]
