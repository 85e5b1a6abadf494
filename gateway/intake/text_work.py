"""Threads for the work on a request's text before any limit counts it: decoding, checking, templates, tokens.

The queue is fair by tenant, in bytes. Large bodies never take all threads, unless there is only one: a small body waits
for no large one. All state belongs to the loop; a thread only runs the function that it is given.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from aiohttp import web

from gateway.intake.fair_queue import FairQueue

T = TypeVar("T")

SMALL_BYTES = 64 * 1024
"""A body of at most this size takes a few milliseconds."""
LEAST_BYTES = 1024
"""The smallest cost of a run in bytes: that of the change to a thread."""


@dataclass(frozen=True, eq=False)
class _Turn:
    is_large: bool
    has_come: asyncio.Future[None]


class TextWork:
    """Runs functions in threads, by turns. `close` must be called."""

    def __init__(self, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="text")
        self._num_free = num_threads
        self._num_free_for_large = max(1, num_threads - 1)
        self._queue: FairQueue[_Turn] = FairQueue()

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_waiting_bytes(self) -> int:
        return self._queue.num_units

    async def run(self, tenant: str, num_bytes: int, function: Callable[[], T]) -> T:
        """Runs `function` in a thread when it is this tenant's turn. If the caller is cancelled before that, it does
        not begin. Once begun, it runs to its end and keeps its thread.
        """
        is_large = num_bytes > SMALL_BYTES
        await self._turn(tenant, max(num_bytes, LEAST_BYTES), is_large)
        loop = asyncio.get_running_loop()

        def ended(_: Future[Any]) -> None:
            try:
                loop.call_soon_threadsafe(self._leave, is_large)
            except RuntimeError:
                pass  # the loop is closed: no caller is left to wait

        try:
            running = self._threads.submit(function)
        except BaseException:
            self._leave(is_large)
            raise
        running.add_done_callback(ended)
        return await asyncio.wrap_future(running)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, tenant: str, units: int, is_large: bool) -> None:
        turn = _Turn(is_large, asyncio.get_running_loop().create_future())
        self._queue.push(tenant, units, turn)
        self._admit()
        try:
            await turn.has_come
        except asyncio.CancelledError:
            if not turn.has_come.cancelled():  # its turn came at the same moment
                self._leave(is_large)
            else:
                self._queue.remove(tenant, turn)
            raise

    def _admit(self) -> None:
        while self._num_free:
            most = None if self._num_free_for_large else SMALL_BYTES
            turn = self._queue.pop(most)
            if turn is None:
                return
            if not turn.has_come.cancelled():
                self._num_free -= 1
                self._num_free_for_large -= turn.is_large
                turn.has_come.set_result(None)

    def _leave(self, is_large: bool) -> None:
        self._num_free += 1
        self._num_free_for_large += is_large
        self._admit()


TEXT_WORK = web.AppKey("text_work", TextWork)
