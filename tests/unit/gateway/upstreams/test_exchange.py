"""One exchange with an upstream, as its connection has it."""

from __future__ import annotations

import asyncio

import pytest

from gateway.base.upstream_source import UpstreamModel, UpstreamSource
from gateway.upstreams import exchange
from gateway.upstreams.wires import kinds
from gateway.upstreams.wires.values import Ask, Interval, Upstream

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = b'data: {"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize(("has_end", "num_connections"), [(True, 1), (False, 2)])
async def test_a_connection_is_used_again_though_the_end_of_an_answer_comes_late(
    monkeypatch: pytest.MonkeyPatch, has_end: bool, num_connections: int
) -> None:
    """Most servers send the end of the body after the last event; each request began with a new TLS handshake."""
    monkeypatch.setattr(exchange, "END_S", 10.0 if has_end else 0.01, raising=False)
    connections: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        while not reader.at_eof():
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                break
            [length] = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            await reader.readexactly(int(length.split(b":")[1]))
            writer.write(HEAD + b"%x\r\n%s\r\n" % (len(EVENTS), EVENTS))
            await writer.drain()
            await asyncio.sleep(0.02)
            if has_end:
                writer.write(b"0\r\n\r\n")

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    upstream = Upstream("mock", UpstreamSource(url=url, models={"m": UpstreamModel()}))
    ask = Ask("chat", {"messages": []}, 1, 5, Interval(0, 1, 100))
    async with exchange.new_session() as session:
        for _ in range(2):
            texts = [
                chunk.text
                async for several in exchange.chunks(session, kinds.of("openai"), upstream, "m", ask)
                for chunk in several
            ]
            assert "".join(texts) == "hi"
    server.close()
    for writer in connections:
        writer.close()
    assert len(connections) == num_connections
