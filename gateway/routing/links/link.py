"""The gateway's view of a worker: a link, a call that is sent over it, and events that come back. It has no sockets.

A worker is one of ours, or a server of somebody else (`gateway/upstreams/`), which sends text in place of token ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from accounting.values.types import BoughtAttempt
from gateway.base.errors import ApiError
from gateway.routing.links.cache_view import CacheView
from workers.protocol.messages import Failed, Finished, GenerateRequest, Hello, TokenDelta
from workers.protocol.patience import Silence
from workers.protocol.registry import Registration
from workers.protocol.reports import AdapterState, WorkerStatus


@dataclass(frozen=True)
class Lost:
    """The attempt ended without a message of the worker: its link broke, or it sent something impossible."""

    why: str
    is_quarantined: bool = False
    """Workers have ended under this request too often: it is refused for some minutes."""


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of a tool call. The first of a call has its id and its name."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New output of a choice as text, from a worker whose token ids nobody knows. `num_tokens` counts for the lease."""

    index: int
    num_tokens: int
    text: str = ""
    reasoning: str = ""
    calls: Sequence[CallPiece] = ()
    finish: str | None = None
    """stop, length or tool_calls, in the choice's last delta."""


@dataclass(frozen=True)
class Refused:
    """The attempt ended with an error that the client is shown."""

    error: ApiError


Event = TokenDelta | TextDelta | Finished | Failed | Lost | Refused


class Mailbox:
    """The events of one HTTP request's calls, in order. There is one reader."""

    def __init__(self) -> None:
        self._items: list[tuple[int, Event]] = []
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._handle: Callable[[int, Event], bool] | None = None
        self._silence: Silence | None = None

    def put(self, call: int, event: Event) -> None:
        if self._handle is None or self._failure is not None:
            self._items.append((call, event))
            ends_wait = True
        else:
            if self._silence is not None:
                self._silence.heard()
            try:
                ends_wait = self._handle(call, event)
            except Exception as error:  # noqa: BLE001 - the reader raises it; the link goes on with other requests
                self.fail(error)
                return
            if ends_wait:
                self._handle = None
        if ends_wait and self._waiter is not None:
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

    async def feed(self, handle: Callable[[int, Event], bool], limit_s: float | None = None) -> bool:
        """Calls `handle` with each event at the moment when it comes, until it returns True. To wake a task takes longer
        than to handle a token. Returns False if nothing came for `limit_s`, or up to a quarter longer. Raises what
        `handle` raises, or what `fail` was given. Events that come afterwards wait for `take`.
        """
        waiting, self._items = self._items, []
        self._handle = handle
        for call, event in waiting:
            self.put(call, event)
        is_done = self._handle is None
        try:
            if not is_done and self._failure is None:
                await self._wait_in_silence(limit_s)
                is_done = self._handle is None
        finally:
            self._handle = None
        if self._failure is not None:
            raise self._failure
        return is_done

    async def _wait_in_silence(self, limit_s: float | None) -> None:
        self._waiter = waiter = asyncio.get_running_loop().create_future()
        if limit_s is not None:
            self._silence = Silence(limit_s, partial(self._wake, waiter))
        try:
            await waiter
        finally:
            self._waiter = None
            if self._silence is not None:
                self._silence.stop()
                self._silence = None

    async def _wait(self, limit_s: float | None) -> None:
        """Waits for one event, by one timer at most: a timeout of the library takes as long as handling a token."""
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

    @property
    def bought(self) -> Sequence[BoughtAttempt]:
        """The attempts that were bought of others for it. It is empty for a worker of our own."""
        ...

    @property
    def num_reasoning(self) -> int | None:
        """The output tokens that are reasoning, if the worker counts them itself."""
        ...

    def extend(self, bound: int, *, last: bool = False, wait_ms: int = 0) -> None: ...

    def cancel(self, index: int = -1, reason: str = "client") -> None: ...

    def close(self) -> None:
        """Ends the interest in this call; later events are dropped."""
        ...


class Link(Protocol):
    """The way to a worker, as the router and a generation use it."""

    registration: Registration
    hello: Hello | None
    status: WorkerStatus
    cached: CacheView

    @property
    def adapters(self) -> Mapping[str, AdapterState]: ...

    @property
    def takes_work(self) -> bool: ...

    @property
    def is_silent(self) -> bool: ...

    @property
    def load(self) -> int: ...

    @property
    def num_unreported_tokens(self) -> int: ...

    def has_adapter(self, name: str) -> bool: ...

    def promised(self, num_uncached: int) -> AbstractContextManager[None]: ...

    def start_call(
        self, request: GenerateRequest, mailbox: Mailbox, number: int, num_uncached: int = 0, ask: Any = None
    ) -> Call:
        """Sends a request. `ask` is the same request for a worker that knows no token ids; others ignore it."""
        ...


def reads(link: Link, vocabulary: str) -> bool:
    """Says whether a worker means the same tokens by the ids of a vocabulary, given its digest. One of them that is not
    known counts as the same. While the weights of a model are replaced by others with another tokenizer, workers of both
    are linked, and each gateway has one of the tokenizers.
    """
    said = link.hello.vocabulary if link.hello is not None else ""
    return not said or not vocabulary or said == vocabulary
