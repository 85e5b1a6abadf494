"""One multiplexed connection: ordered messages both ways over a unix socket or TCP.

Owns a stream pair and the write queue's bound; knows nothing of requests. Heartbeats are messages like any
other: whoever owns the connection sends them and judges the silence.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from workers.protocol.frames import FrameReader, encode
from workers.protocol.messages import Message
from workers.protocol.patience import patience

READ_BYTES = 256 * 1024
HEARTBEAT_S = 1.0
SILENCE_S = 3.0
"""A peer that says nothing for this long, while this process's loop runs, is lost."""


class Connection:
    """Send from any task of the loop; iterate from exactly one."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._frames = FrameReader()

    def send(self, message: Message) -> None:
        """Queues one frame; a lost peer shows in the iterator, not here."""
        if not self._writer.is_closing():
            self._writer.write(encode(message))

    @property
    def num_queued_bytes(self) -> int:
        """Bytes the peer has not taken yet: a peer that stops reading shows here."""
        return int(self._writer.transport.get_write_buffer_size())

    async def __aiter__(self) -> AsyncIterator[list[Message]]:
        """Messages in order, grouped as they arrived. Ends when the peer closes or is silent for `SILENCE_S`;
        raises `FrameError` on garbage."""
        while True:
            try:
                async with patience(SILENCE_S):
                    data = await self._reader.read(READ_BYTES)
            except (TimeoutError, ConnectionError):
                return
            if not data:
                return
            messages = self._frames.feed(data)
            if messages:
                yield messages

    def close(self) -> None:
        self._writer.close()

    def abort(self) -> None:
        """Drops what is queued: for a peer that no longer reads."""
        self._writer.transport.abort()


async def dial(address: str) -> Connection:
    """Connects to `unix:/path` or `tcp:host:port`. Raises `OSError`."""
    kind, _, rest = address.partition(":")
    if kind == "unix":
        return Connection(*await asyncio.open_unix_connection(rest))
    host, _, port = rest.rpartition(":")
    return Connection(*await asyncio.open_connection(host, int(port)))
