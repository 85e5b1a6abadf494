"""One event stream to one client: it sends events, sends pings in gaps, and handles a client that does not read.

The connection bounds the queue of unsent bytes (`http_limits.MAX_QUEUE_BYTES`). Above the bound, writing waits and the
worker is asked to park the sequence; after the write timeout the connection is dropped.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgspec
from aiohttp import web
from aiohttp.http import StreamWriter

HOLD_EVERY_S = 5.0
QUIET_S = 15.0
"""The time after which an answer that grows without any event gets a ping: its thoughts are not shown, say."""
HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
DONE = b"data: [DONE]\n\n"
COMMENT = b": ping\n\n"


CONTENT_TYPE = HEADERS["content-type"]
_json = msgspec.json.Encoder().encode


class ClientStalled(ConnectionError):
    """The client took nothing for the whole write timeout."""


@dataclass(frozen=True)
class EventStyle:
    """The way in which the events of a stream are written."""

    named: bool = False
    """Whether each event has a line `event:` with its own `type`."""
    ends_with_done: bool = True
    """Whether `data: [DONE]` ends the stream."""
    ping: Mapping[str, Any] | None = None
    """The event that fills a silence. None stands for a comment."""

    def encode(self, events: Iterable[Any]) -> bytes:
        if self.named:
            parts = [b"event: %b\ndata: %b\n\n" % (event["type"].encode(), _json(event)) for event in events]
        else:
            parts = [b"data: %b\n\n" % _json(event) for event in events]
        return b"".join(parts)

    @property
    def done(self) -> bytes:
        return DONE if self.ends_with_done else b""

    @property
    def silence(self) -> bytes:
        """Returns what is sent while there is nothing to send."""
        return COMMENT if self.ping is None else self.encode([self.ping])


CHAT = EventStyle()
RESPONSES = EventStyle(named=True)
MESSAGES = EventStyle(named=True, ends_with_done=False, ping={"type": "ping"})


class EventStream:
    def __init__(
        self,
        request: web.Request,
        timeout_s: float,
        hold: Callable[[], None] = lambda: None,
        release: Callable[[], None] = lambda: None,
        style: EventStyle = CHAT,
    ) -> None:
        self._request = request
        self._timeout_s = timeout_s
        self._hold = hold
        self._release = release
        self._style = style
        self._quiet_since = time.monotonic()
        """When the last event was written."""
        self._pushed: list[bytes] = []
        """The events, encoded, that this turn of the loop has pushed."""
        self._failure: Exception | None = None
        self.response: web.StreamResponse | None = None

    async def start(self, headers: Mapping[str, str]) -> None:
        """Prepares the response. The status leaves with the first event."""
        self.response = web.StreamResponse(headers={**HEADERS, **headers})
        await self.response.prepare(self._request)

    async def send(self, *events: Any) -> None:
        """Sends any number of JSON events in one write."""
        await self.write(self._style.encode(events))

    @property
    def can_push(self) -> bool:
        """Whether a write without `drain` waits for nothing. One to a WebSocket may wait, and so may a kept stream."""
        return type(self) is EventStream and isinstance(self._request.writer, StreamWriter)

    def push(self, *events: Any) -> bool:
        """Sends JSON events at the end of this turn of the loop, with all others of the turn: a write takes as long as
        everything else that is done for a token. Returns False if the next ones have to wait for `room`. Raises what an
        earlier write has raised. Needs `can_push`.
        """
        if self._failure is not None:
            raise self._failure
        if data := self._or_ping(self._style.encode(events)):
            if not self._pushed:
                asyncio.get_running_loop().call_soon(self._flush)
            self._pushed.append(data)
        return not self._request.protocol.writing_paused

    def _flush(self) -> None:
        """Writes what was pushed."""
        if not self._pushed:
            return
        data, self._pushed = b"".join(self._pushed), []
        try:
            _at_once(self._writer.write(data, drain=False))
        except Exception as error:  # noqa: BLE001 - the next piece raises it, where its reader hears it
            self._failure = error

    async def ping(self) -> None:
        await self.write(self._style.silence)

    async def close(self, *events: Any, done: bool = True) -> web.StreamResponse:
        """Sends the last events and the end of the body at once. Without `done` there is no `[DONE]`."""
        assert self.response is not None
        self._flush()  # nothing may come after the end of the body
        if data := self._style.encode(events) + (self._style.done if done else b""):
            await self.write(data)
        await self.response.write_eof()
        return self.response

    async def write(self, data: bytes) -> None:
        """Hands bytes to the connection. It waits only if those before have filled the queue."""
        assert self.response is not None
        self._flush()
        if self._failure is not None:
            raise self._failure
        await self.room()
        await self._writer.write(self._or_ping(data), drain=False)

    def _or_ping(self, data: bytes) -> bytes:
        """Returns the data of a piece, or a ping if it has none and nothing was written for `QUIET_S`."""
        now = time.monotonic()
        if not data and now - self._quiet_since < QUIET_S:
            return data
        self._quiet_since = now
        return data or self._style.silence

    async def room(self) -> None:
        """Waits until the client has read, if the queue is full. Raises `ClientStalled`."""
        if self._request.protocol.writing_paused:
            await self._until_it_reads()

    @property
    def _writer(self) -> StreamWriter:
        return cast(StreamWriter, self._request.writer)

    async def _until_it_reads(self) -> None:
        self._hold()
        now = asyncio.get_running_loop().time
        until = now() + self._timeout_s
        while self._request.protocol.writing_paused:
            left_s = until - now()
            if left_s <= 0 or self._request.transport is None:
                self._drop()
            await asyncio.sleep(0)  # `drain` need not give way: it returns at once where the connection is lost
            try:
                async with asyncio.timeout(min(HOLD_EVERY_S, left_s)):
                    await self._request.writer.drain()
            except TimeoutError:
                self._hold()
        self._release()

    def _drop(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()
        raise ClientStalled("the client does not read")


def _at_once(work: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine that waits for nothing, as a write without `drain` does."""
    try:
        work.send(None)
    except StopIteration:
        return
    work.close()
    raise RuntimeError("a write without drain has waited")


class KeptStream(EventStream):
    """The stream of a request with an idempotency key. It keeps its events as they are sent, and goes on when its
    client has gone.
    """

    def __init__(
        self,
        request: web.Request,
        timeout_s: float,
        hold: Callable[[], None],
        release: Callable[[], None],
        style: EventStyle = CHAT,
    ) -> None:
        super().__init__(request, timeout_s, hold, release, style)
        self._packer = zlib.compressobj(level=1)
        self._packed = bytearray()
        self._is_heard = True

    async def start(self, headers: Mapping[str, str]) -> None:
        try:
            await super().start(headers)
        except ConnectionError:
            self._is_heard = False

    async def send(self, *events: Any) -> None:
        data = self._style.encode(events)
        self._packed += self._packer.compress(data)
        await self.write(data)

    async def write(self, data: bytes) -> None:
        if not self._is_heard:
            return
        try:
            await super().write(data)
        except ConnectionError:
            self._is_heard = False
            self._release()

    def whole(self, *events: Any) -> bytes:
        """Returns all events sent so far and these last ones, compressed, before the last ones are sent.
        Call it once.
        """
        last = self._style.encode(events) + self._style.done
        return bytes(self._packed) + self._packer.compress(last) + self._packer.flush()

    async def close(self, *events: Any, done: bool = True) -> web.StreamResponse:
        try:
            return await super().close(*events, done=done)
        except ConnectionError:
            assert self.response is not None
            return self.response
