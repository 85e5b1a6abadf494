"""One event stream to one client: events out, pings in gaps, and what happens when the client does not read.

The queue of unsent bytes is bounded by the connection (`http_limits.MAX_QUEUE_BYTES`): above it writing waits, the
sequence is told to park, and after the write timeout the connection is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web

HOLD_EVERY_S = 5.0
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


class ClientStalled(ConnectionError):
    """The client took nothing for the whole write timeout."""


class EventStream:
    def __init__(
        self,
        request: web.Request,
        timeout_s: float,
        hold: Callable[[], None],
        release: Callable[[], None],
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
        await self._write(
            b"".join(b"data: %b\n\n" % msgspec.json.encode(event) for event in events)
        )

    async def ping(self) -> None:
        await self._write(b": ping\n\n")

    async def end(self, done: bool = True) -> web.StreamResponse:
        """The end of the body, at once; without `[DONE]` after a failure."""
        assert self.response is not None
        if done:
            await self._write(b"data: [DONE]\n\n")
        await self.response.write_eof()
        return self.response

    async def _write(self, data: bytes) -> None:
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
