"""Bytes of a file to a client: it may read slowly, as long as it reads."""

from __future__ import annotations

import asyncio
import time
from typing import Literal

from aiohttp import web

from accounting.batches import files
from accounting.batches.batches import BatchInfo
from accounting.batches.file_store import Reader
from accounting.batches.files import FileInfo
from gateway.base import errors
from gateway.base.app_keys import FILES, SETTINGS
from gateway.http.sql import reading
from gateway.idempotency.data_keys import DATA_KEYS

PIECE_BYTES = 64 * 1024
"""The bytes that a client has the whole write timeout for."""


async def opened(request: web.Request, file: FileInfo) -> Reader:
    """Opens a stored file. Raises `ApiError` 404 where its bytes are gone."""
    data_key = await request.app[DATA_KEYS].key(file.tenant_id)
    try:
        return await asyncio.to_thread(request.app[FILES].open, file.storage_key, data_key)
    except FileNotFoundError:
        raise errors.not_found() from None


async def of_batch(request: web.Request, batch: BatchInfo, which: Literal["input", "output", "error"]) -> Reader:
    """Opens a file of the tenant's batch. Raises `ApiError` 404 that names it where it was deleted or has expired."""
    try:
        async with reading(request) as conn:
            file = await files.get(conn, batch.tenant_id, getattr(batch, f"{which}_file_id"), int(time.time()))
        return await opened(request, file)
    except errors.ApiError as error:
        if error.status != 404:
            raise
        raise errors.ApiError(
            404,
            f"The {which} file of this batch is not there any more: it was deleted, or has expired.",
            code="file_not_found",
            param=f"{which}_file_id",
        ) from None


async def send(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    """Sends bytes, and waits where the connection takes no more. Raises TimeoutError if the client reads nothing for the
    whole write timeout.
    """
    for start in range(0, len(data), PIECE_BYTES):
        async with asyncio.timeout(request.app[SETTINGS].write_timeout_s):
            await response.write(data[start : start + PIECE_BYTES])
