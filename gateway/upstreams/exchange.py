"""One HTTP exchange with an upstream: it is sent, and its answer becomes chunks, within bounds of time and size.

Redirects are refused, nothing is unpacked, and no proxy of the environment is asked. What goes wrong is an
`AttemptFailed`, whose words hold neither the address nor the credential.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import ParamSpec, TypeVar

import aiohttp

from gateway.upstreams import outcomes
from gateway.upstreams.outcomes import Fault
from gateway.upstreams.wires import events
from gateway.upstreams.wires.values import Ask, Chunk, Garbage, Outgoing, Upstream
from gateway.upstreams.wires.wire import Failure, Wire

logger = logging.getLogger(__name__)
END_S = 0.1
"""The longest wait for the end of a body whose last event has come."""
P = ParamSpec("P")
T = TypeVar("T")


class AttemptFailed(Exception):
    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.reason)
        self.fault = fault


def new_session() -> aiohttp.ClientSession:
    """Makes the session of all upstreams. Cookies of one must not reach another."""
    return aiohttp.ClientSession(
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
        connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=60),
        auto_decompress=False,
        trust_env=False,
    )


async def chunks(
    session: aiohttp.ClientSession, wire: Wire, upstream: Upstream, served: str, ask: Ask, traceparent: str = ""
) -> AsyncGenerator[Sequence[Chunk]]:
    """Yields what the upstream answers. It is sent the request's `traceparent` (W3C Trace Context), which servers such as
    vLLM and SGLang continue. Raises `AttemptFailed`.
    """
    source, loop = upstream.source, asyncio.get_running_loop()
    outgoing, deadline = wire.request(upstream, served, ask), loop.time() + source.first_byte_s
    if traceparent:
        outgoing = dataclasses.replace(outgoing, headers={**outgoing.headers, "traceparent": traceparent})
    response = await _sent(session, "POST", outgoing, upstream, source.first_byte_s)
    try:
        expected = "application/json" if ask.endpoint == "embeddings" else "text/event-stream"
        if response.content_type != expected or "content-encoding" in response.headers:
            raise AttemptFailed(Fault("content_type"))
        if ask.endpoint == "embeddings":
            data = await _within(source.idle_s, events.whole(response.content.readany))
            yield _read(wire.whole, data, ask)
            return
        reader, stream = wire.reader(ask), events.events(response.content.readany)
        left = deadline - loop.time()
        while (event := await _within(left, _next(stream))) is not None:
            left = source.idle_s
            yield _read(reader.read, event)
            if reader.has_ended:
                with contextlib.suppress(AttemptFailed):  # behind the end of its body a connection is used again
                    await _within(END_S, response.content.readany())
                return
    finally:
        response.close()


async def page(
    session: aiohttp.ClientSession, outgoing: Outgoing, upstream: Upstream, limit_s: float, most: int
) -> bytes:
    """Gets a JSON document of at most `most` bytes. Raises `AttemptFailed`."""
    deadline = asyncio.get_running_loop().time() + limit_s
    response = await _sent(session, "GET", outgoing, upstream, limit_s)
    try:
        if response.content_type != "application/json" or "content-encoding" in response.headers:
            raise AttemptFailed(Fault("content_type"))
        left = deadline - asyncio.get_running_loop().time()
        return await _within(left, events.whole(response.content.readany, most))
    finally:
        response.close()


async def _next(stream: AsyncIterator[bytes]) -> bytes | None:
    return await anext(stream, None)


async def probe(session: aiohttp.ClientSession, wire: Wire, upstream: Upstream) -> Fault | None:
    """Asks an upstream for what costs nothing. Returns the fault, or None if address and credential are right."""
    outgoing = wire.probe(upstream)
    if outgoing is None:
        return None
    try:
        response = await _sent(session, "GET", outgoing, upstream, min(10.0, upstream.source.first_byte_s))
        response.close()
    except AttemptFailed as failed:
        return failed.fault
    return None


async def _sent(
    session: aiohttp.ClientSession, method: str, outgoing: Outgoing, upstream: Upstream, limit_s: float
) -> aiohttp.ClientResponse:
    """Returns an answer with status 200 whose body is not read yet."""
    connect_s = upstream.source.connect_s
    timeout = aiohttp.ClientTimeout(total=None, connect=connect_s, sock_connect=connect_s)
    sending = session.request(
        method,
        outgoing.url,
        headers={**outgoing.headers, "accept-encoding": "identity"},
        data=outgoing.body or None,
        allow_redirects=False,
        timeout=timeout,
    )
    response: aiohttp.ClientResponse = await _within(limit_s, sending)
    if response.status == 200:
        return response
    try:
        body = await _within(2.0, response.content.read(events.MAX_ERROR_BYTES))
    except AttemptFailed:
        body = b""
    finally:
        response.close()
    raise AttemptFailed(outcomes.of_status(response.status, response.headers, body))


async def _within(limit_s: float, work: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(max(0.0, limit_s)):
            return await work
    except aiohttp.ConnectionTimeoutError:
        raise AttemptFailed(Fault("connect", "address")) from None
    except TimeoutError:
        raise AttemptFailed(Fault("stalled")) from None
    except aiohttp.ClientConnectorError:
        raise AttemptFailed(Fault("connect", "address")) from None
    except (aiohttp.ClientError, OSError, ValueError):
        raise AttemptFailed(Fault("disconnected")) from None
    except Garbage as garbage:
        raise failure_of(garbage) from None


def _read(read: Callable[P, Sequence[Chunk]], *args: P.args, **kwargs: P.kwargs) -> Sequence[Chunk]:
    try:
        return read(*args, **kwargs)
    except Garbage as garbage:
        raise failure_of(garbage) from None
    except Failure as failure:
        raise AttemptFailed(Fault("overloaded" if failure.is_busy else "error_event")) from None


def failure_of(garbage: Garbage) -> AttemptFailed:
    """Makes the failure of an answer that is none, and logs why it is none."""
    logger.warning("upstream_sent_garbage", extra={"why": str(garbage)})
    return AttemptFailed(Fault("garbage"))
