"""One multiplexed connection: ordered messages in both directions over a unix socket or TCP.

It owns a pair of streams and knows the bytes that wait to be written; it knows nothing of requests. Heartbeats are
messages like any other: the owner of the connection sends them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from workers.protocol.frames import FrameReader, encode
from workers.protocol.messages import Message
from workers.protocol.patience import Silence

READ_BYTES = 256 * 1024
HEARTBEAT_S = 1.0
SILENCE_S = 3.0
"""Seconds of silence after which a peer is lost, or up to a quarter more. Only time in which this process's loop runs
counts."""


class Connection:
    """A connection. Any task of the loop may send; exactly one may iterate, and it awaits nothing between two groups of
    messages, because the peer's silence is counted meanwhile."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._frames = FrameReader()

    def send(self, message: Message) -> None:
        """Queue one frame. A lost peer shows in the iterator, not here."""
        if not self._writer.is_closing():
            self._writer.write(encode(message))

    @property
    def num_queued_bytes(self) -> int:
        """The bytes that the peer has not taken yet. A peer that stops reading shows here."""
        return int(self._writer.transport.get_write_buffer_size())

    async def __aiter__(self) -> AsyncIterator[list[Message]]:
        """Yield messages in order, grouped as they arrived. It ends when the peer closes or is silent for `SILENCE_S`:
        the connection is then aborted. Raises `FrameError` for bytes that are no frame."""
        silence = Silence(SILENCE_S, self.abort)
        try:
            while data := await self._reader.read(READ_BYTES):
                silence.heard()
                messages = self._frames.feed(data)
                if messages:
                    yield messages
        except ConnectionError:
            return
        finally:
            silence.stop()

    def close(self) -> None:
        self._writer.close()

    def abort(self) -> None:
        """Close at once and drop the queued bytes. It is for a peer that no longer reads."""
        self._writer.transport.abort()


async def dial(address: str) -> Connection:
    """Connect to `unix:/path` or `tcp:host:port`. Raises `OSError`."""
    kind, _, rest = address.partition(":")
    if kind == "unix":
        return Connection(*await asyncio.open_unix_connection(rest))
    host, _, port = rest.rpartition(":")
    return Connection(*await asyncio.open_connection(host, int(port)))
