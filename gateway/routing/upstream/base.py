"""What the rest of the gateway knows of a worker: a call that is sent, and events that come back. No sockets."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from workers.protocol.messages import Failed, Finished, TokenDelta


@dataclass(frozen=True)
class Lost:
    """The attempt ended without a word of the worker: its link broke, or it sent what cannot be."""

    why: str


Event = TokenDelta | Finished | Failed | Lost


class Mailbox:
    """Where the events of one HTTP request's calls meet, in order. One reader."""

    def __init__(self) -> None:
        self._items: list[tuple[int, Event]] = []
        self._failure: Exception | None = None
        self._ready = asyncio.Event()

    def put(self, call: int, event: Event) -> None:
        self._items.append((call, event))
        self._ready.set()

    def fail(self, error: Exception) -> None:
        """The reader gets this instead of what comes later: the process drains, a lease is lost."""
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
        """After `fail`: the reader goes on, for the endings."""
        self._failure = None


class Call(Protocol):
    """One attempt of a request on a worker."""

    worker: str

    def extend(self, bound: int, *, last: bool = False, wait_ms: int = 0) -> None: ...

    def cancel(self, index: int = -1, reason: str = "client") -> None: ...

    def close(self) -> None:
        """Nobody listens any more; what still comes is dropped."""
        ...
