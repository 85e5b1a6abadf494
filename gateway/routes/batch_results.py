"""`GET /v1/batches/{id}/results`: the result of every line that has ended until now, as JSON lines, while the batch runs too.

Answers of a running batch lie in SQL and are read page by page, so that a client that reads slowly holds no transaction.
Once the batch has ended they lie in its two files.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from aiohttp import web
from sqlalchemy import Row

from accounting.batches import batches, files
from accounting.batches.batches import BatchInfo
from accounting.requests import batch_results
from gateway.http.auth import PRINCIPAL
from gateway.http.route_table import Route
from gateway.http.sql import reading
from gateway.idempotency.data_keys import DATA_KEYS
from gateway.routes import downloads

PART_BYTES = 1024 * 1024


class BatchEnded(ConnectionError):
    """The batch ended while its results were sent: the answers are in its files now. The connection breaks."""


async def results(request: web.Request) -> web.StreamResponse:
    """Lists the results of a batch's lines."""
    tenant_id = request[PRINCIPAL].tenant_id
    async with reading(request) as conn:
        batch = await batches.get(conn, tenant_id, request.match_info["batch"])
    data_key = await request.app[DATA_KEYS].key(tenant_id)
    parts = _of_files(request, batch) if batch.state in files.ENDED else _of_rows(request, batch, data_key)
    first = await anext(parts, b"")  # read before the head leaves, so that a database that is away is an error
    response = web.StreamResponse(headers={"content-type": "application/jsonl", "x-content-type-options": "nosniff"})
    await response.prepare(request)
    await downloads.send(request, response, first)
    async for part in parts:
        await downloads.send(request, response, part)
    await response.write_eof()
    return response


async def _of_rows(request: web.Request, batch: BatchInfo, data_key: bytes) -> AsyncIterator[bytes]:
    """Yields the results of ended lines, page by page. Raises `BatchEnded`."""
    after = 0
    while True:
        async with reading(request) as conn:
            rows = await batch_results.line_page(conn, batch.id, after)
            batch = await batches.get(conn, batch.tenant_id, batch.id)
        if batch.state in files.ENDED:
            break
        if not rows:
            return
        after = rows[-1].line_no
        yield await asyncio.to_thread(_lines, rows, data_key)
    if after:
        raise BatchEnded(batch.id)
    async for part in _of_files(request, batch):
        yield part


def _lines(rows: Sequence[Row[Any]], data_key: bytes) -> bytes:
    return b"".join(batch_results.result_line(row, data_key) for row in rows if row.state != "started")


async def _of_files(request: web.Request, batch: BatchInfo) -> AsyncIterator[bytes]:
    """Yields the file of answers, then the file of errors. Raises `ApiError` 404 if one of them was deleted."""
    made = [file_id for file_id in (batch.output_file_id, batch.error_file_id) if file_id is not None]
    async with reading(request) as conn:
        found = [await files.get(conn, batch.tenant_id, file_id, int(time.time())) for file_id in made]
    for file in found:
        reader = await downloads.opened(request, file)
        try:
            num_sent = 0
            while part := await asyncio.to_thread(reader.read, num_sent, PART_BYTES):
                num_sent += len(part)
                yield part
        finally:
            reader.close()


ROUTES = [Route("GET", "/v1/batches/{batch}/results", results, "batch")]
