"""A stream that pushes writes without waiting, which only the writer of an answer over HTTP can promise."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.http import StreamWriter

from gateway.http.sse import EventStream, EventStyle, KeptStream
from gateway.routes.response_socket import _Events


class Transport:
    def __init__(self) -> None:
        self.written: list[bytes] = []

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        self.written.append(bytes(data))

    def writelines(self, parts: list[bytes]) -> None:
        self.write(b"".join(parts))


def over_http() -> Any:
    protocol: Any = SimpleNamespace(transport=Transport(), writing_paused=False, _paused=False)
    writer = StreamWriter(protocol, asyncio.get_running_loop())
    writer.enable_chunking()
    return SimpleNamespace(writer=writer, protocol=protocol)


async def test_only_a_plain_stream_over_http_may_push() -> None:
    over_socket: Any = SimpleNamespace(writer=_Events.__new__(_Events))
    assert EventStream(over_http(), 1.0).can_push
    assert not EventStream(over_socket, 1.0).can_push
    assert not KeptStream(over_http(), 1.0, lambda: None, lambda: None).can_push


async def test_the_pushes_of_a_turn_are_one_write_and_say_whether_more_may_follow() -> None:
    request = over_http()
    written = request.protocol.transport.written
    stream = EventStream(request, 1.0)
    assert stream.push({"a": 1}, {"b": 2})
    assert stream.push({"c": 3})
    assert written == []
    await asyncio.sleep(0)
    assert written == [b'2d\r\ndata: {"a":1}\n\ndata: {"b":2}\n\ndata: {"c":3}\n\n\r\n']
    request.protocol.writing_paused = True
    assert not stream.push({"d": 4})
    assert not stream.push()
    await asyncio.sleep(0)
    assert len(written) == 2


async def test_what_was_pushed_goes_before_what_is_written_in_the_same_turn() -> None:
    request = over_http()
    stream = EventStream(request, 1.0)
    stream.response = web.StreamResponse()
    stream.push({"a": 1})
    await stream.send({"b": 2})
    assert request.protocol.transport.written == [b'f\r\ndata: {"a":1}\n\n\r\n', b'f\r\ndata: {"b":2}\n\n\r\n']


async def test_what_was_pushed_goes_before_the_end_of_the_body() -> None:
    request = over_http()
    stream = EventStream(request, 1.0, style=EventStyle(ends_with_done=False))
    written = request.protocol.transport.written

    class Response(web.StreamResponse):
        async def write_eof(self, data: bytes = b"") -> None:
            written.append(b"the end")

    stream.response = Response()
    stream.push({"a": 1})
    await stream.close()
    await asyncio.sleep(0)
    assert written == [b'f\r\ndata: {"a":1}\n\n\r\n', b"the end"]


async def test_a_client_that_has_gone_is_told_by_the_next_piece_or_write() -> None:
    request = over_http()
    stream = EventStream(request, 1.0)
    stream.response = web.StreamResponse()
    request.protocol.transport = None
    assert stream.push({"a": 1})
    await asyncio.sleep(0)
    with pytest.raises(ConnectionResetError):
        stream.push({"b": 2})
    with pytest.raises(ConnectionResetError):
        await stream.send({"c": 3})


async def test_pieces_without_events_are_no_silence_for_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thoughts that are not shown came for minutes, and the client heard nothing."""
    request, style = over_http(), EventStyle(ping={"type": "ping"})
    stream = EventStream(request, 1.0, style=style)
    stream.response = web.StreamResponse()
    monkeypatch.setattr("gateway.http.sse.QUIET_S", 1000.0)
    stream.push()
    await stream.send()
    assert request.protocol.transport.written == []
    monkeypatch.setattr("gateway.http.sse.QUIET_S", 0.0)
    stream.push()
    await asyncio.sleep(0)
    await stream.send()
    assert request.protocol.transport.written == [b'17\r\ndata: {"type":"ping"}\n\n\r\n'] * 2


async def test_a_push_that_would_wait_is_a_fault() -> None:
    class Waiting:
        async def write(self, data: bytes, *, drain: bool) -> None:
            await asyncio.sleep(0)

    request: Any = SimpleNamespace(writer=Waiting(), protocol=SimpleNamespace(writing_paused=False))
    stream = EventStream(request, 1.0)
    stream.push({"a": 1})
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="has waited"):
        stream.push({"b": 2})
