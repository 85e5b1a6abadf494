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
        self._ready = asyncio.Event()

    def put(self, call: int, event: Event) -> None:
        self._items.append((call, event))
        self._ready.set()

    def fail(self, error: Exception) -> None:
        """Makes the reader raise this error instead of taking further events: the process drains, or a
        lease is lost.
        """
        self._failure = self._failure or error
        self._ready.set()

    async def take(self) -> list[tuple[int, Event]]:
        """Waits for at least one event. Raises what `fail` was given, before any event."""
        await self._ready.wait()
        if self._failure is not None:
            raise self._failure
        self._ready.clear()
        items, self._items = self._items, []
        return items

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
