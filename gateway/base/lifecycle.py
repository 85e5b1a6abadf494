"""What state the process is in, and the owner of tasks that outlive a request. Knows no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, TypeVar

from gateway.base.checks import Check, Report, report

logger = logging.getLogger(__name__)

UNINTERRUPTED_S = 5.0

T = TypeVar("T")


class Lifecycle:
    """Starting → ready → draining → cut: running streams end with `server_draining`."""

    def __init__(self) -> None:
        self.started = False
        self.draining = asyncio.Event()
        self.accepting = True
        """False once the grace of a drain is over: what still arrives on open connections gets 503."""
        self.on_cut: set[Callable[[], None]] = set()
        """What runs registers here how it is told to end now."""
        self.checks: Callable[[], Iterable[Check]] = tuple
        """What it depends on, as of now."""
        self.num_workers: Callable[[], dict[str, int]] = dict
        """Linked workers per model, for the operator's probe."""
        self.num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around whatever a drain has to wait for."""
        self.num_running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_running -= 1
            if not self.num_running:
                self._idle.set()

    def cut(self) -> None:
        for end in list(self.on_cut):
            end()

    async def idle(self, timeout_s: float) -> bool:
        """Waits until nothing runs; False if the time was not enough."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def report(self) -> Report:
        """Whether this process may take traffic, and what is missing."""
        if not self.started:
            return Report("starting")
        if self.draining.is_set():
            return Report("draining")
        return report(self.checks())


async def uninterrupted(work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work`; a cancellation meanwhile is raised after it has ended. For SQL: what a driver leaves behind
    when it is cut off in a transaction may block the next one."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task], timeout=UNINTERRUPTED_S)
        task.cancel()
        raise


def heed_cancellation() -> None:
    """Raises what redis-py has taken for a failed connection: the caller is to end."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


class Detached:
    """Owns tasks that a vanished client must not take along: settlements, aborts. Awaited at the end."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("detached_task_failed", exc_info=error, extra={"task": task.get_name()})

    async def join(self, timeout_s: float) -> None:
        """Waits for all; what is not done then is cancelled."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=timeout_s)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)
