"""The state of the process, and the owner of tasks that outlive a request. This module knows no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from functools import partial, update_wrapper
from typing import Any, ParamSpec, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from gateway.base.checks import Check, Report, report
from gateway.base.errors import ApiError
from gateway.base.redis_link import LimiterUnavailable
from workers.process.rounds import name_of, num_failed, repeat, restarted, within

logger = logging.getLogger(__name__)

UNINTERRUPTED_S = 5.0
CANCEL_AGAIN_S = 1.0

P = ParamSpec("P")
T = TypeVar("T")


class Lifecycle:
    """The states are starting, ready, draining and cut. At the cut, running streams end with `server_draining`."""

    def __init__(self) -> None:
        self.started = False
        self.draining = asyncio.Event()
        self.is_leaving = False
        """The grace time of a drain is over, and the listener is closed. A request that still arrives on an open connection
        is served, and its answer closes the connection.
        """
        self.accepting = True
        """The value is False once all that ran has ended, or half of the time for it is over. Requests that arrive then get
        503.
        """
        self.on_cut: set[Callable[[], None]] = set()
        """Functions that end running work now; running work registers itself here."""
        self.checks: Callable[[], Iterable[Check]] = tuple
        """Returns the checks of all dependencies, as of now."""
        self.num_workers: Callable[[], dict[str, int]] = dict
        """Returns the number of linked workers per model, for the operator's probe."""
        self.num_running = 0
        self.num_begun = 0
        """The number of times that work began which a drain waits for."""
        self._idle = asyncio.Event()
        self._idle.set()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Wraps work that a drain must wait for."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self) -> None:
        """Begins work that a drain must wait for. `end` ends it."""
        self.num_running += 1
        self.num_begun += 1
        self._idle.clear()

    def end(self) -> None:
        self.num_running -= 1
        if not self.num_running:
            self._idle.set()

    def cut(self) -> None:
        for end in list(self.on_cut):
            end()

    async def idle(self, timeout_s: float) -> bool:
        """Waits until nothing runs. Returns False if the time was not enough."""
        return await within(self._idle, timeout_s)

    def report(self) -> Report:
        """Reports whether this process may take traffic, and what is missing."""
        if not self.started:
            return Report("starting")
        if self.draining.is_set():
            return Report("draining")
        return report(self.checks())


async def uninterrupted(work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work`; a cancellation that comes meanwhile is raised after the work has ended. SQL needs this: a driver
    that is cut off inside a transaction may leave something that blocks the next one.
    """
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task], timeout=UNINTERRUPTED_S)
        task.cancel()
        raise


async def ask_sql(
    every_s: float, work: Callable[[], Coroutine[Any, Any, object]], *, waits_first: bool = False
) -> None:
    """Does a round of work in SQL every `every_s` seconds, each one uninterrupted. While SQL does not answer, what the
    last round brought stays in force.
    """
    round = update_wrapper(lambda: uninterrupted(work()), work)  # under the work's own name
    await repeat(every_s, round, forgives=(SQLAlchemyError, OSError), waits_first=waits_first)


def report_end(task: asyncio.Task[None]) -> None:
    """Counts and logs the error that ends a background task which may not begin again (`restarted`) before the next start
    of the process.
    """
    name = name_of(task.get_coro())
    num_failed[name] += 0

    def report(task: asyncio.Future[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            num_failed[name] += 1
            logger.error("background_task_failed", exc_info=error, extra={"work": name})

    task.add_done_callback(report)


def count_fault(name: str, error: BaseException) -> None:
    """Counts an error that ended work of this name, unless a dependency is away or a client is refused: that is no fault
    of ours.
    """
    if not isinstance(error, ApiError | LimiterUnavailable | SQLAlchemyError | OSError):
        num_failed[name] += 1


class background:
    """Runs `work(*args, **options)` for the length of a block, and begins it again if a fault of ours ends it."""

    def __init__(self, work: Callable[P, Coroutine[Any, Any, None]], *args: P.args, **options: P.kwargs) -> None:
        self._work = restarted(work, *args, **options)

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._work)

    async def __aexit__(self, *_: object) -> None:
        # redis-py may take a cancellation for a failed connection, so it is repeated until it is heard.
        while not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task], timeout=CANCEL_AGAIN_S)


class Detached:
    """Owns work that must outlive a client that has gone: settlements, aborts. It is awaited at the end."""

    def __init__(self) -> None:
        self._work: set[asyncio.Future[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name=name)
        self.keep(task, name)
        return task

    def keep(self, work: asyncio.Future[Any], name: str) -> None:
        """Owns work that has begun."""
        self._work.add(work)
        work.add_done_callback(partial(self._done, name))

    def _done(self, name: str, work: asyncio.Future[Any]) -> None:
        self._work.discard(work)
        if not work.cancelled() and (error := work.exception()) is not None:
            count_fault(name, error)
            logger.error("detached_task_failed", exc_info=error, extra={"task": name})

    async def join(self, timeout_s: float) -> None:
        """Waits for all of it, what begins meanwhile too, then cancels what is not done in time."""
        until = time.monotonic() + timeout_s
        while self._work and (left_s := until - time.monotonic()) > 0:
            await asyncio.wait(self._work, timeout=left_s)
        if late := list(self._work):
            for task in late:
                task.cancel()
            await asyncio.wait(late)
