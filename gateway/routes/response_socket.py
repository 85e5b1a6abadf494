"""`GET /v1/responses` as a WebSocket: each message asks for a response, and its events come back as messages.

A message is a request of its own, with its own id, checks, limits and ledger entry, so nothing differs from
`POST /v1/responses`, except that a response that is not stored can be gone on from while the connection lives.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec
from aiohttp import WSCloseCode, WSMsgType, hdrs, web
from aiohttp.abc import AbstractStreamWriter
from multidict import CIMultiDict

from gateway.base import errors
from gateway.base.app_keys import LIFECYCLE, SETTINGS
from gateway.http import inner_calls
from gateway.http.route_table import Route
from gateway.responses.connection import Connection

MAX_WAITING = 8
"""The most messages that wait for the one that runs."""
IDLE_S = 600.0
PASSED_ON = (
    "authorization",
    "x-api-key",
    "api-key",
    "x-forwarded-for",
    hdrs.HOST,
    "traceparent",
    "x-client-request-id",
)
"""The headers of the handshake that each request of the connection has too."""


async def connect(request: web.Request) -> web.StreamResponse:
    """Opens a WebSocket on which responses are created one after the other."""
    socket = web.WebSocketResponse(max_msg_size=request.app[SETTINGS].json_body_bytes, compress=False)
    if not socket.can_prepare(request).ok:
        raise errors.invalid("This path is a WebSocket; POST creates a response without one.")
    await socket.prepare(request)
    waiting: asyncio.Queue[str] = asyncio.Queue(MAX_WAITING)
    turns = asyncio.create_task(_turns(request, socket, waiting))
    try:
        async for message in socket:
            if message.type is not WSMsgType.TEXT:
                await socket.close(code=WSCloseCode.UNSUPPORTED_DATA, message=b"messages are text")
            elif waiting.full():
                await socket.close(code=WSCloseCode.POLICY_VIOLATION, message=b"too many messages wait")
            else:
                waiting.put_nowait(message.data)
    finally:
        turns.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await turns
    return socket


async def _turns(request: web.Request, socket: web.WebSocketResponse, waiting: asyncio.Queue[str]) -> None:
    """Answers messages until nobody asks any more, or this process stops."""
    connection = Connection()
    draining = asyncio.create_task(request.app[LIFECYCLE].draining.wait())
    try:
        while (text := await _next(waiting, draining)) is not None:
            await _turn(request, socket, connection, text)
    except ConnectionError:
        pass  # the client has left in the middle of an answer, which ended the request
    finally:
        draining.cancel()
        await socket.close(code=WSCloseCode.GOING_AWAY, message=b"idle, or the server stops")


async def _next(waiting: asyncio.Queue[str], draining: asyncio.Task[bool]) -> str | None:
    asked = asyncio.create_task(waiting.get())
    try:
        await asyncio.wait((asked, draining), timeout=IDLE_S, return_when=asyncio.FIRST_COMPLETED)
        return asked.result() if asked.done() else None
    finally:
        asked.cancel()


async def _turn(request: web.Request, socket: web.WebSocketResponse, connection: Connection, text: str) -> None:
    """Answers one message: with the events of a response, or with one event that says why there is none."""
    try:
        body = connection.body_of(_decoded(text))
    except errors.ApiError as error:
        await _refuse(socket, error.status, error.body())
        return
    headers = CIMultiDict((name, value) for name in PASSED_ON for value in request.headers.getall(name, ()))
    headers[hdrs.CONTENT_TYPE] = "application/json"
    events = _Events(socket, connection)
    answer = await inner_calls.call(request, "POST", request.rel_url, headers, msgspec.json.encode(body), events)
    if isinstance(answer, web.Response):
        assert isinstance(answer.body, bytes)
        connection.failed()
        await _refuse(socket, answer.status, answer.body)


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError):
        raise errors.invalid("The message is not valid JSON.", code="invalid_json") from None


async def _refuse(socket: web.WebSocketResponse, status: int, body: bytes) -> None:
    error = msgspec.json.decode(body)["error"]
    error["code"] = error["code"] or error["type"]
    await _send(socket, {"type": "error", "status": status, "error": error})


async def _send(socket: web.WebSocketResponse, event: dict[str, Any]) -> None:
    await socket.send_str(msgspec.json.encode(event).decode())


class _Events(AbstractStreamWriter):
    """Takes what a stream of events would send to an HTTP client, and sends each event as a message."""

    def __init__(self, socket: web.WebSocketResponse, connection: Connection) -> None:
        self._socket = socket
        self._connection = connection
        self._rest = b""

    async def write(self, chunk: bytes | bytearray | memoryview, *, drain: bool = True) -> None:
        *whole, self._rest = (self._rest + bytes(chunk)).split(b"\n\n")
        for written in whole:
            data = written.partition(b"data: ")[2]
            if data and data != b"[DONE]":
                await _send(self._socket, self._connection.seen(msgspec.json.decode(data)))
            elif written.startswith(b":"):
                await self._socket.ping()

    async def write_eof(self, chunk: bytes = b"") -> None:
        await self.write(chunk)

    async def drain(self) -> None:
        """`send_str` has waited already."""

    async def write_headers(self, status_line: str, headers: CIMultiDict[str]) -> None:
        """The head of the answer has no place in a WebSocket."""

    def enable_chunking(self) -> None:
        """Messages have bounds of their own."""

    def enable_compression(self, encoding: str = "deflate", strategy: int | None = None) -> None:
        """Nothing is compressed."""


ROUTES = [Route("GET", "/v1/responses", connect, "chat")]
