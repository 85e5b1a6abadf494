"""Work that a process does again and again, and the wait in between."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


async def repeat(
    every_s: float,
    work: Callable[[], Awaitable[object] | None],
    *,
    forgives: tuple[type[Exception], ...] = (),
    on_failure: Callable[[Exception], None] | None = None,
    waits_first: bool = False,
) -> None:
    """Does a round of work, waits `every_s` seconds, and so on until the task is cancelled. A round that raises an error
    of `forgives` is left to the next one; every other error ends the task. A cancellation ends it even if the round
    swallowed it (`heed_cancellation`).
    """
    if waits_first:
        await asyncio.sleep(every_s)
    while True:
        try:
            if (round := work()) is not None:
                await round
        except forgives as failure:
            if on_failure is not None:
                on_failure(failure)
        heed_cancellation()
        await asyncio.sleep(every_s)


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
