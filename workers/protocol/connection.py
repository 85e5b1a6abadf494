"""One multiplexed connection: ordered messages in both directions over a unix socket or TCP.

It owns a pair of streams and knows the bytes that wait to be written; it knows nothing of requests. Heartbeats are
messages like any other: the owner of the connection sends them.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from typing import Any

from workers.protocol import addresses
from workers.protocol.frames import FrameReader, encode
from workers.protocol.messages import Message
from workers.protocol.patience import Silence

READ_BYTES = 256 * 1024
HEARTBEAT_S = 1.0
HANDSHAKE_S = 3.0
"""The longest time for a handshake of TLS."""
SILENCE_S = 3.0
"""Seconds of silence after which a peer is lost, or up to a quarter more. Only time in which this process's loop runs
counts."""


class Connection:
    """A connection. Any task of the loop may send; exactly one may listen or iterate, and then awaits nothing between two groups
    of messages, because the peer's silence is counted meanwhile."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._frames = FrameReader()
        self._silence: Silence | None = None
        self.is_aborted = False
        """Whether this side has cut it."""

    def send(self, message: Message) -> None:
        """Queues one frame. A lost peer shows in the iterator, not here."""
        if not self._writer.is_closing():
            self._writer.write(encode(message))

    @property
    def num_queued_bytes(self) -> int:
        """The bytes that the peer has not taken yet. A peer that stops reading shows here."""
        return int(self._writer.transport.get_write_buffer_size())

    @property
    def is_silent(self) -> bool:
        """Whether the peer has not been heard for more than half of the time after which it is lost. Only `listen` knows."""
        return self._silence is not None and self._silence.is_long

    async def __aiter__(self) -> AsyncIterator[list[Message]]:
        """Yields messages in order, grouped as they arrived. It ends when the peer closes or is silent for `SILENCE_S`:
        the connection is then aborted. Raises `FrameError` for bytes that are no frame."""
        silence = Silence(SILENCE_S, self.abort)
        try:
            while data := await self._reader.read(READ_BYTES):
                silence.heard()
                messages = self._frames.feed(data)
                if messages:
                    yield messages
        except (ConnectionError, ssl.SSLError):
            return
        finally:
            silence.stop()

    async def listen(self, handle: Callable[[list[Message]], None]) -> None:
        """Calls `handle` with messages, grouped as they arrive, until the iterator would end. It is called where they
        are read, and no task is woken for them. Raises `FrameError`, and what `handle` raises.
        """
        self._silence = Silence(SILENCE_S, self.abort)
        listener = _Listener(self._frames, handle, self._silence)
        try:
            data = await self._reader.read(READ_BYTES)  # more than the reader holds
            listener.take_over(self._writer.transport)
            listener.data_received(data)
            if not self._reader.at_eof() or listener.ended.done():
                await listener.ended
        except (ConnectionError, ssl.SSLError):
            return
        finally:
            listener.stop()

    def close(self) -> None:
        self._writer.close()

    def abort(self) -> None:
        """Closes at once and drops the queued bytes. It is for a peer that no longer reads."""
        self.is_aborted = True
        self._writer.transport.abort()


class _Listener(asyncio.Protocol):
    """Reads frames in place of a stream's reader, whose task each piece wakes."""

    def __init__(self, frames: FrameReader, handle: Callable[[list[Message]], None], silence: Silence) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._frames = frames
        self._handle = handle
        self._silence = silence
        self._transport: Any = None
        self._opener: Any = None

    def take_over(self, transport: Any) -> None:
        self._transport, self._opener = transport, transport.get_protocol()
        transport.set_protocol(self)

    def data_received(self, data: bytes) -> None:
        if self.ended.done():
            return
        self._silence.heard()
        try:
            if messages := self._frames.feed(data):
                self._handle(messages)
        except Exception as fault:  # noqa: BLE001 - whoever listens raises it
            self.ended.set_exception(fault)
            self._transport.abort()

    def connection_lost(self, reason: Exception | None) -> None:
        self._opener.connection_lost(reason)
        if not self.ended.done():
            self.ended.set_result(None)

    def stop(self) -> None:
        self._silence.stop()


async def dial(address: str, context: ssl.SSLContext | None = None) -> Connection:
    """Connects to `unix:/path` or `tcp:host:port`, the latter by TLS if there is a context. Raises `OSError`."""
    where = addresses.host_port(address)
    if where is None:
        return Connection(*await asyncio.open_unix_connection(address.removeprefix("unix:")))
    host, port = where
    if context is None:
        return Connection(*await asyncio.open_connection(host, port))
    opened = await asyncio.open_connection(
        host,
        port,
        ssl=context,
        server_hostname=host,
        ssl_handshake_timeout=HANDSHAKE_S,
        ssl_shutdown_timeout=HANDSHAKE_S,
    )
    return Connection(*opened)
