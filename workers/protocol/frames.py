"""Length-prefixed msgpack: bytes to messages and back. The module is pure and knows no socket.

A frame is a u32 length, big endian, followed by one msgpack value of the tagged union `Message`. The ids of a prompt are
one binary value, little endian, of four bytes each. A list of numbers is read too: the version before sends it.
"""

from __future__ import annotations

import struct
import sys
from array import array
from typing import Any

import msgspec

from workers.protocol.messages import Message

MAX_FRAME_BYTES = 16 * 1024 * 1024

_LENGTH = struct.Struct(">I")


def _pack(ids: Any) -> bytes:
    if not isinstance(ids, array):
        raise NotImplementedError(f"{type(ids).__name__} has no place in a frame")
    return _little_endian(ids).tobytes()


def _unpack(kind: type, value: Any) -> array[int]:
    """Reads the ids of a prompt. A number that is no id is not lost here: the worker refuses the request that has it."""
    if isinstance(value, bytes):
        ids = array("i")
        ids.frombytes(value)
        return _little_endian(ids)
    try:
        return array("i", value)
    except OverflowError:
        pass
    try:
        return array("q", value)
    except OverflowError as error:
        raise ValueError("a number beyond 64 bits") from error


def _little_endian(ids: array[int]) -> array[int]:
    if sys.byteorder == "big":
        ids = ids[:]
        ids.byteswap()
    return ids


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack)
_decoder = msgspec.msgpack.Decoder(Message, dec_hook=_unpack)


class FrameError(ValueError):
    """The peer sent bytes that are not a valid frame. The link must be closed."""


def encode(message: Message) -> bytes:
    """Return one frame. Raises `FrameError` above `MAX_FRAME_BYTES`."""
    buffer = bytearray(_LENGTH.size)
    _encoder.encode_into(message, buffer, _LENGTH.size)
    num_bytes = len(buffer) - _LENGTH.size
    if num_bytes > MAX_FRAME_BYTES:
        raise FrameError(f"frame of {num_bytes} bytes exceeds {MAX_FRAME_BYTES}")
    _LENGTH.pack_into(buffer, 0, num_bytes)
    return bytes(buffer)


class FrameReader:
    """Turns a stream of arbitrary pieces into messages. It holds at most one unfinished frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Return all messages that `data` completes. Raises `FrameError` on a bad length or body."""
        self._buffer += data
        messages: list[Message] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (num_bytes,) = _LENGTH.unpack_from(self._buffer, start)
            if num_bytes > MAX_FRAME_BYTES:
                raise FrameError(f"peer announced a frame of {num_bytes} bytes")
            end = start + _LENGTH.size + num_bytes
            if len(self._buffer) < end:
                break
            try:
                messages.append(_decoder.decode(memoryview(self._buffer)[start + _LENGTH.size : end]))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise FrameError(f"undecodable frame: {error}") from None
            start = end
        del self._buffer[:start]
        return messages
