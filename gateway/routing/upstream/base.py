"""The gateway's view of a worker: a call that is sent, and events that come back. It has no sockets."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from workers.protocol.messages import Failed, Finished, TokenDelta


@dataclass(frozen=True)
class Lost:
    """The attempt ended without a message of the worker: its link broke, or it sent something impossible."""

    why: str


Event = TokenDelta | Finished | Failed | Lost


class Mailbox:
    """The events of one HTTP request's calls, in order. There is one reader."""

    def __init__(self) -> None:
        self._items: list[tuple[int, Event]] = []
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, call: int, event: Event) -> None:
        self._items.append((call, event))
        if self._waiter is not None:
            self._wake(self._waiter)

    def fail(self, error: Exception) -> None:
        """Makes the reader raise this error instead of taking further events: the process drains, or a
        lease is lost.
        """
        self._failure = self._failure or error
        if self._waiter is not None:
            self._wake(self._waiter)

    async def take(self, limit_s: float | None = None) -> list[tuple[int, Event]]:
        """Waits for at least one event, or returns none after `limit_s`. Raises what `fail` was given, before any
        event.
        """
        if not self._items and self._failure is None:
            await self._wait(limit_s)
        if self._failure is not None:
            raise self._failure
        items, self._items = self._items, []
        return items

    async def _wait(self, limit_s: float | None) -> None:
        """Waits by one timer at most: a timeout of the library takes as long as handling a token."""
        loop = asyncio.get_running_loop()
        self._waiter = waiter = loop.create_future()
        timer = None if limit_s is None else loop.call_later(limit_s, self._wake, waiter)
        try:
            await waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    @staticmethod
    def _wake(waiter: asyncio.Future[None]) -> None:
        if not waiter.done():
            waiter.set_result(None)

    def forgive(self) -> None:
        """Removes the error of `fail`, so that the reader can take the endings."""
        self._failure = None


class Call(Protocol):
    """One attempt of a request on a worker."""

    worker: str

    def extend(self, bound: int, *, last: bool = False, wait_ms: int = 0) -> None: ...

    def cancel(self, index: int = -1, reason: str = "client") -> None: ...

    def close(self) -> None:
        """Ends the interest in this call; later events are dropped."""
        ...
