"""The limits of a connection: timers for the first byte and the headers, connections per address, the queue of unsent
bytes, and errors in our shape for requests that could not be parsed (security.md section 4).

aiohttp has no read timers for headers and answers broken requests in plain text. This module mends both in a subclass
of aiohttp's connection class. It is the only module that knows aiohttp's internals.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from aiohttp import HttpVersion11, WebSocketError, hdrs, web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from aiohttp.web_protocol import RequestHandler, _ErrInfo

from gateway.base import errors, ids
from gateway.base.addresses import Network, within
from gateway.base.settings import GatewaySettings
from gateway.http.body import EXPECTS, BodyCutShort, FramingTooLarge
from gateway.http.dialects import refusal
from gateway.intake.intake import HELD
from gateway.telemetry.keys import RECORD

logger = logging.getLogger(__name__)

MAX_HEADER_LINE_BYTES = 8 * 1024
MAX_HEADERS = 128
MAX_QUEUE_BYTES = 256 * 1024
"""The number of unsent bytes of one connection at which writing waits, and with it the extension of the lease."""
MAX_SYSTEM_BYTES = 128 * 1024
"""The number of bytes that the system keeps for one connection before they are sent. By itself Linux keeps up to 4 MiB for
a client that reads nothing, which is 2 GiB for the connections of one address.
"""
LINGERING_S = 30.0
"""The longest time for which the rest of a refused body is read and dropped. A connection that is closed while its
client still sends is reset, and the client never sees why it was refused."""
LINGERING_IDLE_S = 5.0
"""The time without a byte of that rest after which the connection is closed. nginx has the same two limits by default."""
MAX_FRAMING_BYTES = 16 * 1024
"""The number of bytes that frame the chunks of a body, beside an eighth of the body's own. Each chunk costs the parser a
microsecond whatever its size, so a body in chunks of one byte would take the loop for seconds."""
NOT_SENT: int | None = getattr(socket, "TCP_NOTSENT_LOWAT", None)
"""The option that bounds what is not sent yet. Linux and macOS have it."""
UNACKNOWLEDGED: int | None = getattr(socket, "TCP_USER_TIMEOUT", None)
"""The option that ends a connection whose client acknowledges nothing of what was sent. Linux has it; by itself it waits
a quarter of an hour."""
MIN_READ_BYTES = 64 * 1024
"""The number of bytes that a client reads in two write timeouts while writing waits for it."""
OPENAI_VERSION = "2020-10-01"


@dataclass(frozen=True)
class ConnectionLimits:
    first_byte_s: float
    headers_s: float
    keepalive_s: float
    max_connections: int
    max_per_address: int
    unlimited: tuple[Network, ...]
    write_timeout_s: float

    @property
    def unacknowledged_s(self) -> float:
        """Returns the time after which a client that acknowledges nothing has vanished. A stream of a few hundred
        kilobytes would else run to its end for a host that is gone, because the system takes so much before writing
        waits. It is twice the write timeout, so that a client that is there and reads slowly is judged by that one.
        """
        return 2 * self.write_timeout_s

    @classmethod
    def of(cls, settings: GatewaySettings) -> ConnectionLimits:
        return cls(
            settings.first_byte_s,
            settings.headers_s,
            settings.keepalive_s,
            settings.max_connections,
            settings.max_connections_per_address,
            settings.trusted_networks + settings.unlimited_networks,
            settings.write_timeout_s,
        )


class Addresses:
    """Counts open connections per address; addresses without any are forgotten."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._open: Counter[str] = Counter()
        self.total = 0

    def admit(self, address: str) -> bool:
        """Counts a connection and returns True, or returns False if it may not stay. Each True needs one `leave`."""
        if self.total >= self._limits.max_connections:
            return False
        if self._open[address] >= self._limits.max_per_address and not self.is_unlimited(address):
            return False
        self._open[address] += 1
        self.total += 1
        return True

    def leave(self, address: str) -> None:
        self.total -= 1
        self._open[address] -= 1
        if not self._open[address]:
            del self._open[address]

    def is_unlimited(self, address: str) -> bool:
        """Returns True for exempt peers. A peer without an IP address came by a unix socket."""
        return not address or within(address, self._limits.unlimited)


class GatewayProtocol(RequestHandler):
    """One connection. It waits a limited time for its first byte and for a complete head of each request."""

    __slots__ = (
        "_address",
        "_addresses",
        "_in_head",
        "_is_answered",
        "_last_data_at",
        "_last_payload",
        "_limits",
        "_num_framed",
        "_timer",
        "_unread_timer",
        "message_watch",
    )

    def __init__(self, server: GatewayServer, address: str | None = None, **kwargs: Any) -> None:
        """`address` is that of a connection which is counted already, because its handshake came first."""
        super().__init__(
            server,
            loop=server.loop,
            keepalive_timeout=server.limits.keepalive_s,
            max_line_size=MAX_HEADER_LINE_BYTES,
            max_field_size=MAX_HEADER_LINE_BYTES,
            max_headers=MAX_HEADERS,
            auto_decompress=False,
            lingering_time=LINGERING_S,
            **kwargs,
        )
        self._limits = server.limits
        self._addresses = server.addresses
        self._address = address
        self._timer: asyncio.TimerHandle | None = None
        """The timer of the first byte, of the rest of a head if `_in_head`, or of the rest of a refused body."""
        self._in_head = False
        self._is_answered = False
        """Whether the last answer was sent before its body ended, or a WebSocket was closed while its client may send. What
        still comes is dropped."""
        self._last_data_at = 0.0
        self._last_payload = EMPTY_PAYLOAD
        self._num_framed: int | None = None
        """The number of bytes that came for the last payload, less those of its body that came with the head. None as
        long as it is not known how many these are."""
        self._unread_timer: asyncio.TimerHandle | None = None
        self.message_watch: Callable[[bytes], None] | None = None
        """Called with all that comes on a WebSocket, before it is read. It is set before the upgrade."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._address is None:
            peer = transport.get_extra_info("peername")
            address = peer[0] if isinstance(peer, tuple) else ""
            if not self._addresses.admit(address):
                cast(asyncio.Transport, transport).abort()
                return
            self._address = address
        super().connection_made(transport)
        cast(asyncio.Transport, transport).set_write_buffer_limits(high=MAX_QUEUE_BYTES)
        if self._address:
            self._bound_system(transport.get_extra_info("socket"))
        self._timer = self._loop.call_later(self._limits.first_byte_s, self.force_close)

    def never_made(self) -> None:
        """Ends the count of a connection whose handshake failed."""
        if self._address is not None and self.transport is None:
            self._addresses.leave(self._address)
            self._address = None

    def _bound_system(self, connection: socket.socket) -> None:
        if NOT_SENT is not None:
            connection.setsockopt(socket.IPPROTO_TCP, NOT_SENT, MAX_SYSTEM_BYTES)
        if UNACKNOWLEDGED is not None:
            connection.setsockopt(socket.IPPROTO_TCP, UNACKNOWLEDGED, round(self._limits.unacknowledged_s * 1000))

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.transport is not None:
            self._watch_reader(self.transport)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_watching_reader()

    async def _drain_helper(self) -> None:
        """Waits until writing may go on. All writers of a connection wait for one future, and aiohttp's own method lets
        each of them cancel it: one writer that gives up would end the wait of the others, and every later one.
        """
        if self.transport is None or not self._paused:
            await super()._drain_helper()
            return
        waiter = self._drain_waiter
        if waiter is None:
            waiter = self._drain_waiter = self._loop.create_future()
            waiter.add_done_callback(asyncio.Future.exception)  # nobody may be left to look at it
        await asyncio.wait((waiter,))
        waiter.result()

    def _watch_reader(self, transport: asyncio.Transport, before: tuple[int, ...] = ()) -> None:
        """Drops a client that reads too little while writing waits for it, whoever writes. It is judged over two write
        timeouts: a system announces room in lumps, so that in one of them nothing may leave although it is read.
        """
        num_unsent = transport.get_write_buffer_size()
        if len(before) == 2 and before[0] - num_unsent < MIN_READ_BYTES:
            transport.abort()
            return
        self._unread_timer = self._loop.call_later(
            self._limits.write_timeout_s, self._watch_reader, transport, (*before[-1:], num_unsent)
        )

    def _stop_watching_reader(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def abort(self) -> None:
        """Drops the connection at once: nothing more is read, and what is unsent is lost."""
        if self.transport is not None:
            self.transport.abort()

    def set_parser(self, parser: Any, data_received_cb: Callable[[], None] | None = None) -> None:
        if self.message_watch is not None:
            parser = _Watched(parser, self.message_watch)
        super().set_parser(parser, data_received_cb)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_timer()
        self._stop_watching_reader()
        if self._address is not None:
            self._addresses.leave(self._address)
            self._address = None
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Runs the head's timer from its first byte until the parser has the whole head, and bounds what frames a body."""
        num_before = self._request_count
        is_head = self._last_payload.is_eof() and not self._is_answered
        super().data_received(data)
        if self._request_count > num_before:
            self._stop_timer()
            if self._messages:
                self._last_payload = self._messages[-1][1]
            self._num_framed = None
        elif is_head and data and not self._in_head:
            self._stop_timer()
            self._in_head = True
            self._timer = self._loop.call_later(self._limits.headers_s, self._head_too_slow)
        if not is_head:
            self._last_data_at = self._loop.time()
            if self._num_framed is not None:
                self._num_framed += len(data)
        if not self._reading_paused and not self._buffer_paused:  # else a part is not parsed yet
            self._check_framing()

    def eof_received(self) -> bool:  # type: ignore[override]  # aiohttp always lets the transport close
        """Ends a body whose client will send nothing more, so that it hears why it is refused. A client that has sent
        its whole request and closes its half is one that left: most close both at once, and nothing tells them apart.
        TLS ends both halves at once, so nobody would hear.
        """
        payload = self._last_payload
        if (
            self.transport is None
            or not self.transport.can_write_eof()
            or self._is_answered
            or payload.is_eof()
            or payload.exception() is not None
        ):
            return False
        self._end_body(payload, BodyCutShort())
        return True  # the half of the answer stays open; the handler closes it

    def _end_body(self, payload: StreamReader, why: web.RequestPayloadError) -> None:
        """Lets whoever reads the body hear why it ends. After the answer nobody reads it, so what came is not waited
        for.
        """
        self._lingering_time = 0.0
        payload.set_exception(why)
        payload.feed_eof()
        self.close()

    def _check_framing(self) -> None:
        """Ends a body most of which is the framing of its chunks. What else comes on this connection is dropped unread."""
        payload = self._last_payload
        if payload.is_eof() or payload._eof or payload.exception() is not None:
            return
        num_bytes = payload.total_bytes
        if self._num_framed is None:
            self._num_framed = num_bytes
        elif self._num_framed - num_bytes > MAX_FRAMING_BYTES + num_bytes // 8:
            if self._is_answered:
                self.force_close()
            else:
                self._end_body(payload, FramingTooLarge())

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Sends the answer. If the client still sends its body then, nothing follows the answer: our half of the
        connection is closed, and the rest of the body has to keep coming.
        """
        is_early = not request.content.is_eof()
        if is_early:
            resp.force_close()
        held = request.get(HELD)
        try:
            finished = await super().finish_response(request, resp, start_time)
        finally:
            if held is not None:
                held.close()
        if is_early and self.transport is not None and not request.content.is_eof():
            self._end_answer(self.transport, request.content)
        return finished

    async def linger(self) -> None:
        """Closes our half of a WebSocket, and drops what its client still sends. It is cancelled once the connection has
        ended.
        """
        if self.transport is not None:
            self._end_answer(self.transport, StreamReader(self, 0, loop=self._loop))
            await asyncio.sleep(LINGERING_S)

    def _end_answer(self, transport: asyncio.Transport, rest: StreamReader) -> None:
        if transport.can_write_eof():  # with TLS the answer's length tells where it ends
            transport.write_eof()
        self._is_answered = True
        self._last_data_at = self._loop.time()
        self._watch_rest(rest)

    def _watch_rest(self, rest: StreamReader) -> None:
        """Closes the connection when nothing of a refused body has come for a while."""
        if rest.is_eof():
            return
        left = self._last_data_at + LINGERING_IDLE_S - self._loop.time()
        if left <= 0:
            self.force_close()
            return
        self._stop_timer()
        self._timer = self._loop.call_later(left, self._watch_rest, rest)

    def _stop_timer(self) -> None:
        self._in_head = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _head_too_slow(self) -> None:
        self._stop_timer()
        if self._waiter is None or self._waiter.done():
            return  # a pipelined head after a request that still runs: the keep-alive timer covers it
        error = errors.timeout("The request headers did not arrive in time.")
        self._messages.append((_ErrInfo(408, error, ""), EMPTY_PAYLOAD))
        self._waiter.set_result(None)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """The last resort of a connection: a broken request, or an exception that no handler expected."""
        error = _as_api_error(status, exc)
        has_begun = request.writer.output_size > 0
        if error.status >= 500 and not (has_begun and (exc is None or isinstance(exc, ConnectionError))):
            logger.error("unhandled_exception", exc_info=exc)
        if has_begun:
            raise ConnectionError("an answer has begun; only closing is left")
        response = refusal(request, error)
        if not isinstance(request, web.Request) or RECORD not in request:
            stamp(response, ids.request_id(), 0)
        response.force_close()
        return response


def _as_api_error(status: int, exc: BaseException | None) -> errors.ApiError:
    if isinstance(exc, errors.ApiError):
        return exc
    if isinstance(exc, LineTooLong) or "Too many headers" in str(exc):
        return errors.ApiError(431, "The request headers are too large.", code="headers_too_large")
    if 400 <= status < 500:
        return errors.ApiError(400, "The request is not valid HTTP.", code="invalid_value")
    return errors.internal()


class _Watched:
    """A WebSocket's reader, and who looks at each part before it."""

    def __init__(self, reader: Any, watch: Callable[[bytes], None]) -> None:
        self._reader = reader
        self._watch = watch

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        self._watch(data)
        return cast(tuple[bool, bytes], self._reader.feed_data(data))

    def feed_eof(self) -> None:
        self._reader.feed_eof()


class Socket(web.WebSocketResponse):
    """A WebSocket that leaves the connection open if its client sent what cannot be read, such as a message that is too
    large: `GatewayProtocol.linger` closes it, so that the client sees the code.
    """

    @property
    def was_unreadable(self) -> bool:
        return isinstance(self.exception(), WebSocketError)

    def _close_transport(self) -> None:
        if not self.was_unreadable:
            super()._close_transport()


class GatewayServer(web.Server):
    """Makes `GatewayProtocol` connections and answers `Expect` only when a body is wanted."""

    def __init__(self, server: web.Server, limits: ConnectionLimits) -> None:
        self.loop = asyncio.get_running_loop()
        super().__init__(
            _take_expect(server.request_handler),
            request_factory=server.request_factory,
            handler_cancellation=True,
            loop=self.loop,
        )
        self.limits = limits
        self.addresses = Addresses(limits)

    def __call__(self) -> RequestHandler:
        return GatewayProtocol(self, access_log=None)

    def shaking(self, address: str) -> GatewayProtocol | None:
        """Counts a connection whose handshake begins, and returns its protocol, or None if it may not stay."""
        if not self.addresses.admit(address):
            return None
        return GatewayProtocol(self, address, access_log=None)


def _take_expect(handler: Any) -> Any:
    """Moves `100 Continue`: aiohttp sends it before any check; here the reader of the body does (`body.read`)."""

    async def handle(request: web.Request) -> web.StreamResponse:
        if hdrs.EXPECT not in request.headers:
            return cast(web.StreamResponse, await handler(request))
        headers = request.headers.copy()
        expects = ", ".join(headers.popall(hdrs.EXPECT))
        heard = request.clone(headers=headers)
        if request.version >= HttpVersion11:  # what HTTP/1.0 expects is ignored (RFC 9110, 10.1.1)
            heard[EXPECTS] = expects.lower()
        try:
            return cast(web.StreamResponse, await handler(heard))
        finally:  # aiohttp prepares the answer with its own request, and looks there for who stamps it
            request._match_info = heard._match_info
            request.update(heard)

    return handle


class GatewayRunner(web.AppRunner):
    """An `AppRunner` whose connections obey the limits."""

    __slots__ = ("limits",)

    def __init__(self, app: web.Application, limits: ConnectionLimits, **kwargs: Any) -> None:
        super().__init__(app, **kwargs)
        self.limits = limits

    async def _make_server(self) -> web.Server:
        return GatewayServer(await super()._make_server(), self.limits)


def stamp(response: web.StreamResponse, request_id: str, processing_ms: int) -> None:
    """Sets the headers of every answer. 401 and 404 report a processing time of 0, so that it reveals nothing."""
    headers = response.headers
    headers["x-request-id"] = request_id
    headers["openai-processing-ms"] = "0" if response.status in {401, 404} else str(processing_ms)
    headers["openai-version"] = OPENAI_VERSION
    headers[hdrs.SERVER] = "headgate"
