"""Bytes of a file to a client: it may read slowly, as long as it reads."""

from __future__ import annotations

import asyncio

from aiohttp import web

from gateway.base.app_keys import SETTINGS

PIECE_BYTES = 64 * 1024
"""The bytes that a client has the whole write timeout for."""


async def send(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    """Sends bytes, and waits where the connection takes no more. Raises TimeoutError if the client reads nothing for the
    whole write timeout.
    """
    for start in range(0, len(data), PIECE_BYTES):
        async with asyncio.timeout(request.app[SETTINGS].write_timeout_s):
            await response.write(data[start : start + PIECE_BYTES])
