"""Length-prefixed msgpack: bytes to messages and back, on every link between processes of ours. It knows no link.

A frame is a u32 length, big endian, followed by one msgpack value. A link has one type of values each way; `MESSAGES`
are those between gateways and workers. The ids of a prompt are one binary value, little endian, of four bytes each.
"""

from __future__ import annotations

import asyncio
import struct
import sys
from array import array
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from workers.protocol.messages import Message

MAX_FRAME_BYTES = 16 * 1024 * 1024

_LENGTH = struct.Struct(">I")
_TLS = b"\x16\x03"
"""The first bytes of a handshake. As a length they would be far above every bound."""


def _pack(ids: Any) -> bytes:
    if not isinstance(ids, array):
        raise NotImplementedError(f"{type(ids).__name__} has no place in a frame")
    return _little_endian(ids).tobytes()


def _unpack(kind: type, value: Any) -> array[int]:
    """Reads the ids of a prompt. A number that is no id is not lost here: the worker refuses the request that has it."""
    if not isinstance(value, bytes):
        raise ValueError("the ids of a prompt must be bytes")
    return _little_endian(array("i", value))


def _little_endian(ids: array[int]) -> array[int]:
    if sys.byteorder == "big":
        ids = ids[:]
        ids.byteswap()
    return ids


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack)
M = TypeVar("M")


class FrameError(ValueError):
    """The peer sent bytes that are not a valid frame. The link must be closed."""


class Frames(Generic[M]):
    """The frames whose values are of one type, most often a tagged union."""

    def __init__(self, kind: Any, max_bytes: int = 2**32 - 1) -> None:
        self.max_bytes = max_bytes
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kind, dec_hook=_unpack)

    def encode(self, message: M) -> bytes:
        """Returns one frame. Raises `FrameError` above `max_bytes`."""
        buffer = bytearray(_LENGTH.size)
        _encoder.encode_into(message, buffer, _LENGTH.size)
        num_bytes = len(buffer) - _LENGTH.size
        if num_bytes > self.max_bytes:
            raise FrameError(f"frame of {num_bytes} bytes exceeds {self.max_bytes}")
        _LENGTH.pack_into(buffer, 0, num_bytes)
        return bytes(buffer)

    def length(self, head: bytes | bytearray) -> int:
        (num_bytes,) = _LENGTH.unpack(head)
        if num_bytes > self.max_bytes:
            if head[:2] == _TLS:
                raise FrameError("the peer speaks TLS, and this side does not: HEADGATE_LINK_CA is set there alone")
            raise FrameError(f"peer announced a frame of {num_bytes} bytes")
        return int(num_bytes)

    def decode(self, body: bytes | bytearray | memoryview) -> M:
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise FrameError(f"undecodable frame: {error}") from None

    def read(self, read: Callable[[int], bytes | bytearray]) -> M | None:
        """Reads one frame by a blocking call that returns fewer bytes than it was asked for at the end alone. Returns
        None at the end. Raises `FrameError`, and what the call raises."""
        head = read(_LENGTH.size)
        if len(head) < _LENGTH.size:
            return None
        num_bytes = self.length(head)
        body = read(num_bytes)
        return self.decode(body) if len(body) == num_bytes else None

    async def receive(self, reader: asyncio.StreamReader) -> M:
        """Reads one frame. Raises `FrameError`, `asyncio.IncompleteReadError` at the end, and `OSError`."""
        num_bytes = self.length(await reader.readexactly(_LENGTH.size))
        return self.decode(await reader.readexactly(num_bytes))


MESSAGES: Frames[Message] = Frames(Message, MAX_FRAME_BYTES)
encode = MESSAGES.encode


class FrameReader:
    """Turns a stream of arbitrary pieces into messages. It holds at most one unfinished frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Returns all messages that `data` completes. Raises `FrameError` on a bad length or body."""
        self._buffer += data
        messages: list[Message] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            body = start + _LENGTH.size
            end = body + MESSAGES.length(self._buffer[start:body])
            if len(self._buffer) < end:
                break
            messages.append(MESSAGES.decode(memoryview(self._buffer)[body:end]))
            start = end
        del self._buffer[:start]
        return messages
