"""One event stream to one client: events out, pings in gaps, and what happens when the client does not read.

The queue of unsent bytes is bounded by the connection (`http_limits.MAX_QUEUE_BYTES`): above it writing waits, the
sequence is told to park, and after the write timeout the connection is dropped.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
from aiohttp import web

HOLD_EVERY_S = 5.0
HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
DONE = b"data: [DONE]\n\n"


CONTENT_TYPE = HEADERS["content-type"]


class ClientStalled(ConnectionError):
    """The client took nothing for the whole write timeout."""


def encode(events: Iterable[Any]) -> bytes:
    return b"".join(b"data: %b\n\n" % msgspec.json.encode(event) for event in events)


class EventStream:
    def __init__(
        self,
        request: web.Request,
        timeout_s: float,
        hold: Callable[[], None] = lambda: None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        self._request = request
        self._timeout_s = timeout_s
        self._hold = hold
        self._release = release
        self.response: web.StreamResponse | None = None

    async def start(self, headers: Mapping[str, str]) -> None:
        """The status leaves with the first event."""
        self.response = web.StreamResponse(headers={**HEADERS, **headers})
        await self.response.prepare(self._request)

    async def send(self, *events: Any) -> None:
        """Any number of JSON events in one write."""
        await self.write(encode(events))

    async def ping(self) -> None:
        await self.write(b": ping\n\n")

    async def close(self, *events: Any, done: bool = True) -> web.StreamResponse:
        """The last events and the end of the body, at once; without `[DONE]` after a failure."""
        assert self.response is not None
        if data := encode(events) + (DONE if done else b""):
            await self.write(data)
        await self.response.write_eof()
        return self.response

    async def write(self, data: bytes) -> None:
        assert self.response is not None
        if self._request.protocol.writing_paused:
            await self._until_it_reads()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self.response.write(data)
        except TimeoutError:
            self._drop()

    async def _until_it_reads(self) -> None:
        self._hold()
        waited_s = 0.0
        while self._request.protocol.writing_paused:
            if waited_s >= self._timeout_s:
                self._drop()
            pause_s = min(HOLD_EVERY_S, self._timeout_s - waited_s)
            try:
                async with asyncio.timeout(pause_s):
                    await self._request.writer.drain()
            except TimeoutError:
                waited_s += pause_s
                self._hold()
        self._release()

    def _drop(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()
        raise ClientStalled("the client does not read")


class KeptStream(EventStream):
    """Of a request with a key: its events are kept as they are sent, and go on when nobody hears them any more."""

    def __init__(
        self, request: web.Request, timeout_s: float, hold: Callable[[], None], release: Callable[[], None]
    ) -> None:
        super().__init__(request, timeout_s, hold, release)
        self._packer = zlib.compressobj(level=1)
        self._packed = bytearray()
        self._is_heard = True

    async def start(self, headers: Mapping[str, str]) -> None:
        try:
            await super().start(headers)
        except ConnectionError:
            self._is_heard = False

    async def send(self, *events: Any) -> None:
        data = encode(events)
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
        """All that was sent and these last events, packed, before they are sent themselves. Once."""
        last = encode(events) + DONE
        return bytes(self._packed) + self._packer.compress(last) + self._packer.flush()

    async def close(self, *events: Any, done: bool = True) -> web.StreamResponse:
        try:
            return await super().close(*events, done=done)
        except ConnectionError:
            assert self.response is not None
            return self.response
