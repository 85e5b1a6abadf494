"""The event stream of an upstream, read within bounds: no line, event or answer of a stranger fills our memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

from gateway.upstreams.wires.values import Garbage

MAX_LINE_BYTES = 1024 * 1024
MAX_ANSWER_BYTES = 64 * 1024 * 1024
MAX_ERROR_BYTES = 16 * 1024

Read = Callable[[], Awaitable[bytes]]
"""Returns the next bytes, and none at the end. It raises what a broken connection raises."""


async def events(read: Read) -> AsyncIterator[bytes]:
    """Yields the data of each event. Raises `Garbage` for a line or an answer that is too long."""
    data: list[bytes] = []
    num_bytes = 0
    async for line in _lines(read):
        if not line:
            if data:
                yield b"\n".join(data)
                data, num_bytes = [], 0
        elif line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
            num_bytes += len(line)
            if num_bytes > MAX_LINE_BYTES + len(b"data: "):
                raise Garbage("an event is too long")
        elif not line.startswith((b":", b"event:", b"id:", b"retry:")):
            raise Garbage("a line is none of an event stream")
    if data:
        yield b"\n".join(data)


async def _lines(read: Read) -> AsyncIterator[bytes]:
    buffer = bytearray()
    num_bytes = 0
    while piece := await read():
        num_bytes += len(piece)
        if num_bytes > MAX_ANSWER_BYTES:
            raise Garbage("the answer is too long")
        buffer += piece
        *lines, rest = bytes(buffer).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r")
        if len(rest) > MAX_LINE_BYTES:
            raise Garbage("a line is too long")
        buffer = bytearray(rest)
    if buffer:
        yield bytes(buffer).removesuffix(b"\r")


async def whole(read: Read, most: int = MAX_ANSWER_BYTES) -> bytes:
    """Returns a body. Raises `Garbage` if it is longer than `most`."""
    found = bytearray()
    while piece := await read():
        found += piece
        if len(found) > most:
            raise Garbage("the body is too long")
    return bytes(found)
