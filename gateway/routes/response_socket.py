"""`GET /v1/responses` as a WebSocket: each message asks for a response, and its events come back as messages.

A message is a request of its own, with its own id, checks, limits and ledger entry, so nothing differs from
`POST /v1/responses`, except that a response that is not stored can be gone on from while the connection lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Any, cast

import msgspec
from aiohttp import WSCloseCode, WSMsgType, hdrs, web
from aiohttp.abc import AbstractStreamWriter
from multidict import CIMultiDict

from gateway.base import errors
from gateway.base.app_keys import LIFECYCLE, SETTINGS
from gateway.http import inner_calls
from gateway.http.auth import PRINCIPAL
from gateway.http.body import MIN_BYTES_PER_S, NUM_BODY_BYTES
from gateway.http.http_limits import GatewayProtocol, Socket
from gateway.http.route_table import Route
from gateway.intake.intake import INTAKE, Intake
from gateway.intake.json_body import decode_object
from gateway.intake.messages import Unfinished
from gateway.responses.connection import Connection
from gateway.routes.common import aside, decode_aside

logger = logging.getLogger(__name__)

MAX_WAITING = 8
"""The most messages that wait for the one that runs."""
MAX_PINGS = 1000
"""The most pings and pongs between two messages. Empty ones cost a client 6 bytes each, and are answered one by one."""
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
TOLD = ("retry-after", "retry-after-ms", "x-should-retry")
"""The headers of a refusal that its event has too."""


async def connect(request: web.Request) -> web.StreamResponse:
    """Opens a WebSocket on which responses are created one after the other."""
    socket = Socket(max_msg_size=request.app[SETTINGS].json_body_bytes, compress=False, autoping=False)
    if not socket.can_prepare(request).ok:
        raise errors.invalid("This path is a WebSocket; POST creates a response without one.")
    unfinished = _watched(request)
    try:
        await socket.prepare(request)
        await _serve(request, socket)
    finally:
        unfinished.close()
    if socket.was_unreadable:
        await cast(GatewayProtocol, request.protocol).linger()
    return socket


async def _serve(request: web.Request, socket: web.WebSocketResponse) -> None:
    """Listens and answers until the connection ends."""
    waiting = _Waiting(request.app[INTAKE], request[PRINCIPAL].tenant_id)
    turns = asyncio.create_task(_turns(request, socket, waiting))
    try:
        await _listen(request, socket, waiting)
    finally:
        turns.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await turns
        waiting.close()


def _watched(request: web.Request) -> Unfinished:
    """Bounds the message that is not whole, from the handshake on."""
    protocol = request.protocol
    assert isinstance(protocol, GatewayProtocol)
    unfinished = Unfinished(
        request.app[INTAKE], request[PRINCIPAL].tenant_id, request.app[SETTINGS].body_s, MIN_BYTES_PER_S, protocol.abort
    )
    protocol.message_watch = unfinished.feed
    return unfinished


async def _listen(request: web.Request, socket: web.WebSocketResponse, waiting: _Waiting) -> None:
    """Takes messages until the connection ends, and ends it if they are not what a client may send."""
    num_pings = 0
    async for message in socket:
        if message.type in (WSMsgType.PING, WSMsgType.PONG):
            num_pings += 1
            if num_pings > MAX_PINGS:
                cast(GatewayProtocol, request.protocol).abort()  # a closing handshake would read on
                return
            if message.type is WSMsgType.PING:
                await socket.pong(message.data)
        elif message.type is not WSMsgType.TEXT:
            await socket.close(code=WSCloseCode.UNSUPPORTED_DATA, message=b"messages are text")
        elif waiting.messages.full():
            await socket.close(code=WSCloseCode.POLICY_VIOLATION, message=b"too many messages wait")
        else:
            num_pings = 0
            try:
                waiting.put(message.data.encode())
            except errors.ApiError:
                await socket.close(code=WSCloseCode.TRY_AGAIN_LATER, message=b"too many bytes wait")


class _Waiting:
    """Messages that wait for their turn. Their bytes are held as those of a request's body are."""

    def __init__(self, intake: Intake, tenant_id: str) -> None:
        self.messages: asyncio.Queue[bytes] = asyncio.Queue(MAX_WAITING)
        self._intake = intake
        self._tenant_id = tenant_id

    def put(self, text: bytes) -> None:
        """Raises `ApiError` 429. The request that comes of the message counts towards the minute."""
        self._intake.take(self._tenant_id, len(text), counts=False)
        self.messages.put_nowait(text)

    async def get(self) -> bytes:
        text = await self.messages.get()
        self._intake.give_back(self._tenant_id, len(text))
        return text

    def close(self) -> None:
        while not self.messages.empty():
            self._intake.give_back(self._tenant_id, len(self.messages.get_nowait()))


class _Kept:
    """The bytes of the response that a connection keeps. They are held as those of a body are."""

    def __init__(self, intake: Intake, tenant_id: str) -> None:
        self._intake = intake
        self._tenant_id = tenant_id
        self._num_bytes = 0

    def hold(self, connection: Connection) -> None:
        """Holds what the connection keeps now. Where the tenant holds too much already, the connection forgets it."""
        self.give_back()
        try:
            self._intake.take(self._tenant_id, connection.num_kept_bytes, counts=False)
            self._num_bytes = connection.num_kept_bytes
        except errors.ApiError:
            connection.forget()

    def give_back(self) -> None:
        self._intake.give_back(self._tenant_id, self._num_bytes)
        self._num_bytes = 0


async def _turns(request: web.Request, socket: web.WebSocketResponse, waiting: _Waiting) -> None:
    """Answers messages until nobody asks any more, or this process stops."""
    connection = Connection()
    kept = _Kept(request.app[INTAKE], request[PRINCIPAL].tenant_id)
    draining = asyncio.create_task(request.app[LIFECYCLE].draining.wait())
    try:
        while (text := await _next(waiting, draining)) is not None:
            await _turn(request, socket, connection, text)
            kept.hold(connection)
    except ConnectionError:
        pass  # the client has left in the middle of an answer, which ended the request
    except Exception:  # the close ends `_listen`, which cancels this task: nobody else would hear of it
        logger.exception("unhandled_exception")
        await socket.close(code=WSCloseCode.INTERNAL_ERROR, message=b"internal error")
    finally:
        kept.give_back()
        draining.cancel()
        await socket.close(code=WSCloseCode.GOING_AWAY, message=b"idle, or the server stops")


async def _next(waiting: _Waiting, draining: asyncio.Task[bool]) -> bytes | None:
    asked = asyncio.create_task(waiting.get())
    try:
        await asyncio.wait((asked, draining), timeout=IDLE_S, return_when=asyncio.FIRST_COMPLETED)
        return asked.result() if asked.done() else None
    finally:
        asked.cancel()


async def _turn(request: web.Request, socket: web.WebSocketResponse, connection: Connection, text: bytes) -> None:
    """Answers one message: with the events of a response, or with one event that says why there is none."""
    try:
        await _answer(request, socket, connection, text)
    finally:
        connection.over()


async def _answer(request: web.Request, socket: web.WebSocketResponse, connection: Connection, text: bytes) -> None:
    request[NUM_BODY_BYTES] = len(text) + connection.num_kept_bytes
    try:
        body = await decode_aside(request, text, lambda text, cuts: connection.body_of(decode_object(text, cuts)))
    except errors.ApiError as error:
        await _refuse(socket, connection, error.status, error.body(), error.headers)
        return
    headers = CIMultiDict((name, value) for name in PASSED_ON for value in request.headers.getall(name, ()))
    headers[hdrs.CONTENT_TYPE] = "application/json"
    events = _Events(request, socket, connection)
    data = await aside(request, msgspec.json.encode, body)
    answer = await inner_calls.call(request, "POST", request.rel_url, headers, data, events)
    if isinstance(answer, web.Response):
        assert isinstance(answer.body, bytes)
        connection.failed()
        await _refuse(socket, connection, answer.status, answer.body, answer.headers)


async def _refuse(
    socket: web.WebSocketResponse, connection: Connection, status: int, body: bytes, headers: Mapping[str, str]
) -> None:
    error = msgspec.json.decode(body)["error"]
    error["code"] = error["code"] or error["type"]
    told = {name: headers[name] for name in TOLD if name in headers}
    if told:
        error["headers"] = told
    await _send(socket, connection.named({"type": "error", "status": status, "error": error}))


async def _send(socket: web.WebSocketResponse, event: dict[str, Any]) -> None:
    await socket.send_str(msgspec.json.encode(event).decode())


class _Events(AbstractStreamWriter):
    """Takes what a stream of events would send to an HTTP client, and sends each event as a message."""

    def __init__(self, outer: web.Request, socket: web.WebSocketResponse, connection: Connection) -> None:
        self._outer = outer
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
        """Waits until the connection takes more, as the writer of an answer over HTTP does."""
        await self._outer.writer.drain()

    async def write_headers(self, status_line: str, headers: CIMultiDict[str]) -> None:
        """The head of the answer has no place in a WebSocket."""

    def enable_chunking(self) -> None:
        """Messages have bounds of their own."""

    def enable_compression(self, encoding: str = "deflate", strategy: int | None = None) -> None:
        """Nothing is compressed."""


ROUTES = [Route("GET", "/v1/responses", connect, "chat")]
