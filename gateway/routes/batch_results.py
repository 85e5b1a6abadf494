"""`GET /v1/batches/{id}/results`: one JSON line for each line of a batch that has ended, while the batch runs too.

Results come in the order in which lines ended, so that the id of the last one says where a client goes on: no later
answer has a line that belongs before it. Those of a running batch lie in SQL and are read page by page, so that a client
that reads slowly holds no transaction. Once the batch has ended they lie in its two files.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Any

from aiohttp import web
from sqlalchemy import Row

from accounting.batches import batches
from accounting.batches.batches import BatchInfo
from accounting.batches.file_store import Reader
from accounting.requests import batch_results
from accounting.values.types import ENDED_BATCH
from gateway.base import errors
from gateway.base.running import Turns
from gateway.batches import filed
from gateway.batches.filed import Filed, LineStarts
from gateway.batches.waits import BATCH_WAITS, MOST_S
from gateway.http.auth import PRINCIPAL
from gateway.http.middleware import check_again
from gateway.http.route_table import Route
from gateway.http.sql import reading
from gateway.idempotency.data_keys import DATA_KEYS
from gateway.routes import downloads
from gateway.schema import query

STATUS = "x-headgate-batch-status"
"""The header with the batch's status when its answer began. An answer that began after the end has all that is left."""
READ_TURNS = web.AppKey("batch_results_turns", Turns)
"""The turns of tenants at reading results out of SQL, and at looking through the files of a batch that has ended. All that wait
for a batch read at the same moment, and together they would take every connection of SQL from the others."""


async def results(request: web.Request) -> web.StreamResponse:
    """Sends the results of a batch's lines, and waits for some where none is left."""
    until = time.monotonic() + _wait_s(request)
    after = query.text(request.query, "after")
    tenant_id = request[PRINCIPAL].tenant_id
    async with reading(request) as conn:
        batch = await batches.get(conn, tenant_id, request.match_info["batch"])
        after_no = 0 if after is None else await batch_results.ended_no(conn, batch, after)
    if after_no is None:
        raise errors.invalid("'after' must be the id of a result of this batch.", "after")
    found = Results(request, batch, after_no, await request.app[DATA_KEYS].key(tenant_id))
    try:
        part = await found.part()
        while not part and found.batch.state not in ENDED_BATCH and time.monotonic() < until:
            has_news = await request.app[BATCH_WAITS].changed(tenant_id, batch.id, found.batch.progress, until)
            await check_again(request)
            part = await found.part()
            if not has_news:
                break
        return await _sent(request, found, part)
    finally:
        found.close()


def _wait_s(request: web.Request) -> int:
    wait_s = query.integer(request.query, "wait") or 0
    if not 0 <= wait_s <= MOST_S:
        raise errors.invalid(f"'wait' must be 0 to {MOST_S} seconds.", "wait")
    return wait_s


async def _sent(request: web.Request, found: Results, part: bytes) -> web.StreamResponse:
    """Sends the part, and all that follow it until now. The first one was read before the head leaves, so that a
    database that is away is an error.
    """
    headers = {"content-type": "application/jsonl", "x-content-type-options": "nosniff", STATUS: found.batch.state}
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    while part:
        await downloads.send(request, response, part)
        part = await found.part()
    await response.write_eof()
    return response


class Results:
    """Reads results part by part, out of SQL while the batch runs and out of its files once it has ended."""

    def __init__(self, request: web.Request, batch: BatchInfo, after_no: int, data_key: bytes) -> None:
        self.batch = batch
        """The batch as it was before the last part was read."""
        self._request = request
        self._after_no = after_no
        self._data_key = data_key
        self._filed: Iterator[bytes] | None = None
        self._open: list[Reader] = []

    async def part(self) -> bytes:
        """Returns the next results, or nothing where no more lines have ended. Raises `ApiError`: 404 if a file that is
        needed was deleted, and 503.
        """
        if self._filed is None:
            async with self._request.app[READ_TURNS].turn(self.batch.tenant_id):
                rows = await self._rows()
                if self.batch.state not in ENDED_BATCH:
                    return await asyncio.to_thread(_lines, rows, self._data_key)
                self._filed = await self._of_files()
        return await asyncio.to_thread(next, self._filed, b"")

    async def _rows(self) -> Sequence[Row[Any]]:
        """Returns a page of a running batch, whose rows have their answers. It reads the batch first, so that what ends
        meanwhile is news, and once more, because the end of a batch takes the answers from its rows.
        """
        async with reading(self._request) as conn:
            self.batch = await batches.get(conn, self.batch.tenant_id, self.batch.id)
            if self.batch.state in ENDED_BATCH:
                return ()
            rows = await batch_results.ended_page(conn, self.batch.id, self._after_no)
            if rows:
                self.batch = await batches.get(conn, self.batch.tenant_id, self.batch.id)
        if rows and self.batch.state not in ENDED_BATCH:
            self._after_no = rows[-1].ended_no
        return rows

    async def _of_files(self) -> Iterator[bytes]:
        """Looks through those files in which a line is left."""
        batch = self.batch
        async with reading(self._request) as conn:
            if not await batch_results.has_filed_line(conn, batch, self._after_no):
                return iter(())
            lines = await batch_results.filed_lines(conn, batch, self._after_no)
        return filed.parts(lines, {kind: await self._opened(kind) for kind in {line.is_output for line in lines}})

    async def _opened(self, is_output: bool) -> Filed:
        reader = await downloads.of_batch(self._request, self.batch, "output" if is_output else "error")
        self._open.append(reader)
        found, content = Filed(reader, LineStarts()), reader.parts()
        while await asyncio.to_thread(found.starts.take, content):
            pass
        return found

    def close(self) -> None:
        for reader in self._open:
            reader.close()


def _lines(rows: Sequence[Row[Any]], data_key: bytes) -> bytes:
    return b"".join(batch_results.result_line(row, data_key) for row in rows)


ROUTES = [Route("GET", "/v1/batches/{batch}/results", results, "batch")]
