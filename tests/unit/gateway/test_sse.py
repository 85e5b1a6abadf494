"""A stream that pushes writes without waiting, which only the writer of an answer over HTTP can promise."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp.http import StreamWriter

from gateway.http.sse import EventStream, KeptStream
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


async def test_a_push_is_one_write_and_says_whether_more_may_follow() -> None:
    request = over_http()
    stream = EventStream(request, 1.0)
    assert stream.push({"a": 1}, {"b": 2})
    assert request.protocol.transport.written == [b'1e\r\ndata: {"a":1}\n\ndata: {"b":2}\n\n\r\n']
    request.protocol.writing_paused = True
    assert not stream.push({"c": 3})
    assert not stream.push()
    assert len(request.protocol.transport.written) == 2


def test_a_push_that_would_wait_is_a_fault() -> None:
    class Waiting:
        async def write(self, data: bytes, *, drain: bool) -> None:
            await asyncio.sleep(0)

    request: Any = SimpleNamespace(writer=Waiting(), protocol=SimpleNamespace(writing_paused=False))
    with pytest.raises(RuntimeError, match="has waited"):
        EventStream(request, 1.0).push({"a": 1})
