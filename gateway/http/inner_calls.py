"""A request that this process makes of itself, on behalf of one that came from outside.

It passes every middleware, limit and scope, has its own record, and belongs to the connection of the outer request.
"""

from __future__ import annotations

import asyncio

from aiohttp import HttpVersion11, hdrs, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from gateway.intake.intake import HELD
from gateway.telemetry.keys import PAGE_READ, RECORD
from workers.process.logs import HANDLED


async def call(
    outer: web.Request,
    method: str,
    target: URL,
    headers: CIMultiDict[str],
    data: bytes,
    writer: AbstractStreamWriter | None = None,
    *,
    is_page_read: bool = False,
) -> web.StreamResponse:
    """Returns the answer. A streamed one has gone to `writer` already: the outer connection, unless another is given.
    `is_page_read` keeps the request out of the request log.
    """
    if data:
        headers[hdrs.CONTENT_LENGTH] = str(len(data))
    loop = asyncio.get_running_loop()
    payload = EMPTY_PAYLOAD
    if data:
        payload = StreamReader(outer.protocol, limit=len(data), loop=loop)
        payload.feed_data(data)
        payload.feed_eof()
    raw = CIMultiDictProxy(headers)
    message = RawRequestMessage(method, target.raw_path_qs, HttpVersion11, raw, (), False, None, False, False, target)
    request = web.Request(message, payload, outer.protocol, writer or outer.writer, outer.task, loop, client_max_size=0)
    request[PAGE_READ] = is_page_read
    # aiohttp has no public way to ask an application from within; its own server calls this one.
    response = await outer.app._handle(request)
    HANDLED.set(outer[RECORD])  # a failure is told with the ids of the request that failed
    if HELD in request:
        request[HELD].close()
    return response
