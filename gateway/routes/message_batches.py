"""`/v1/messages/batches`: Message Batches in Anthropic's shape, over the batches of `gateway/routes/batches.py`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from aiohttp import web
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.batches import batches, files, message_batches, registration
from accounting.batches.batches import BatchInfo
from accounting.batches.file_store import Reader, Writer
from accounting.values.types import ENDED_BATCH
from gateway.base import errors
from gateway.base.app_keys import DATABASE, FILES
from gateway.base.jobs_notifier import JOBS_NOTIFIER
from gateway.base.lifecycle import uninterrupted
from gateway.http.auth import PRINCIPAL
from gateway.http.route_table import MAX_JSON_BYTES, Route
from gateway.http.sql import reading, writing
from gateway.idempotency import creations
from gateway.idempotency.data_keys import DATA_KEYS
from gateway.messages import batches as shapes
from gateway.messages.batches import PATH, Line, NewMessageBatch, batch_object
from gateway.messages.line_counts import LINE_COUNTS
from gateway.routes import common, downloads
from gateway.routes.files import TENANT_BYTES
from gateway.schema import query
from gateway.schema.organization import reply
from gateway.telemetry.keys import RECORD

MOST_ASKED = 1000
"""The largest page that Anthropic's clients may ask for."""
MOST_SHOWN = 100
"""The largest page that there is. `has_more` says that it was not all, and clients go on by it."""


async def create(request: web.Request) -> web.Response:
    """Stores the requests as the input file of a batch, and makes the batch."""
    model, lines = await common.aside(request, shapes.read, await common.json_object(request))
    if "chat" not in request[PRINCIPAL].scopes:
        raise errors.forbidden("insufficient_scope", "This key may not use the batch's endpoint.")
    common.served_model(request, model)
    data_key = await request.app[DATA_KEYS].key(request[PRINCIPAL].tenant_id)
    # A client that leaves meanwhile changes nothing: the file is kept if and only if the batch is there.
    answer, is_replay = await uninterrupted(_create(request, data_key, lines))
    await request.app[JOBS_NOTIFIER].notify(request[RECORD].outgoing_traceparent)
    return creations.reply(answer, is_replay)


async def _create(request: web.Request, data_key: bytes, lines: Sequence[Line]) -> tuple[bytes, bool]:
    """Stores the lines and makes their batch, once for each Idempotency-Key."""
    writer, sha256 = await asyncio.to_thread(_stored, request, data_key, lines)

    may_be_registered = False

    async def create_in(conn: AsyncConnection) -> dict[str, Any]:
        nonlocal may_be_registered
        may_be_registered = True
        return batch_object(await _register(request, conn, writer, sha256), len(lines), {})

    try:
        known_by = partial(common.in_thread, request, shapes.fingerprint, lines)
        answer, is_replay = await creations.once(request, known_by, create_in)
    except BaseException:
        if may_be_registered:
            await registration.discard(request.app[DATABASE], request.app[FILES], writer.storage_key)
        else:
            request.app[FILES].delete(writer.storage_key)
        raise
    if is_replay:
        request.app[FILES].delete(writer.storage_key)
    return answer, is_replay


def _stored(request: web.Request, data_key: bytes, lines: Sequence[Line]) -> tuple[Writer, str]:
    writer = request.app[FILES].create(data_key)
    try:
        for part in shapes.encoded(lines):
            writer.write(part)
        return writer, writer.finish()
    except BaseException:
        writer.abort()
        raise


async def _register(request: web.Request, conn: AsyncConnection, writer: Writer, sha256: str) -> BatchInfo:
    principal, now = request[PRINCIPAL], int(time.time())
    info = await files.create(
        conn,
        principal.tenant_id,
        purpose="batch",
        name=message_batches.INPUT_NAME,
        num_bytes=writer.num_bytes,
        sha256=sha256,
        storage_key=writer.storage_key,
        now=now,
        actor=principal.key_id,
        most_bytes=TENANT_BYTES,
    )
    return await batches.create(
        conn,
        principal.tenant_id,
        principal.key_id,
        input_file_id=info.id,
        endpoint=message_batches.ENDPOINT,
        completion_window="24h",
        now=now,
        invalid_lines="skip",
        traceparent=request[RECORD].outgoing_traceparent,
    )


async def retrieve(request: web.Request) -> web.Response:
    """Shows a batch of messages."""
    return reply(await _shown(request, await _get(request)))


async def list_all(request: web.Request) -> web.Response:
    """Lists the batches of messages, the newest first."""
    after, before = query.text(request.query, "after_id"), query.text(request.query, "before_id")
    if after is not None and before is not None:
        raise errors.invalid("Only one of 'after_id' and 'before_id' can be given.", "before_id")
    limit = min(query.limit(request.query, 20, MOST_ASKED), MOST_SHOWN)
    async with reading(request) as conn:
        tenant_id = request[PRINCIPAL].tenant_id
        page = await message_batches.list_batches(conn, tenant_id, after=after, before=before, limit=limit)
    data = [await _shown(request, batch) for batch in page.items]
    first_id, last_id = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return reply({"data": data, "has_more": page.has_more, "first_id": first_id, "last_id": last_id})


async def cancel(request: web.Request) -> web.Response:
    """Cancels a batch of messages."""
    principal = request[PRINCIPAL]
    async with writing(request, changes_identities=False) as conn:
        batch = await message_batches.get(conn, principal.tenant_id, _id(request))
        if batch.state not in ENDED_BATCH:
            now = int(time.time())
            batch = await batches.cancel(conn, principal.tenant_id, batch.id, now, actor=principal.key_id)
    await request.app[JOBS_NOTIFIER].notify(request[RECORD].outgoing_traceparent)
    return reply(await _shown(request, batch))


async def delete(request: web.Request) -> web.Response:
    """Deletes a batch of messages that has ended, with its files."""
    principal = request[PRINCIPAL]
    async with writing(request, changes_identities=False) as conn:
        now = int(time.time())
        is_uploaded = await message_batches.has_uploaded_input(conn, principal.tenant_id, _id(request))
        if is_uploaded and "files:write" not in principal.scopes:
            raise errors.forbidden("insufficient_scope", "This key may not delete the uploaded file of this batch.")
        await message_batches.delete(conn, principal.tenant_id, _id(request), now, actor=principal.key_id)
    return reply({"id": _id(request), "type": "message_batch_deleted"})


async def results(request: web.Request) -> web.StreamResponse:
    """Sends one line of JSON for each request, as it is read from the batch's files."""
    batch = await _get(request)
    if batch.state not in ENDED_BATCH:
        raise errors.not_found("The Message Batch has no results yet: it has not ended.")
    found: list[tuple[Reader, Callable[[bytes], bytes]]]
    if not batch.num_total:
        convert = partial(shapes.unrun_result, state=batch.state, faults=batch.errors)
        found = [(await downloads.of_batch(request, batch, "input"), convert)]
    else:
        found = []
        if batch.output_file_id is not None:
            found.append((await downloads.of_batch(request, batch, "output"), shapes.result))
        if batch.error_file_id is not None:
            found.append((await downloads.of_batch(request, batch, "error"), shapes.result))
    response = web.StreamResponse(headers={"content-type": "application/x-jsonl", "x-content-type-options": "nosniff"})
    await response.prepare(request)
    for reader, of_line in found:
        with closing(reader):
            await _send(request, response, shapes.in_chunks(map(of_line, shapes.lines_of(reader.parts()))))
    await response.write_eof()
    return response


async def _send(request: web.Request, response: web.StreamResponse, chunks: Iterator[bytes]) -> None:
    while chunk := await asyncio.to_thread(next, chunks, b""):
        await downloads.send(request, response, chunk)


async def _get(request: web.Request) -> BatchInfo:
    async with reading(request) as conn:
        return await message_batches.get(conn, request[PRINCIPAL].tenant_id, _id(request))


async def _shown(request: web.Request, batch: BatchInfo) -> dict[str, Any]:
    lines: dict[str, int] = {}
    if batch.state in ENDED_BATCH:
        async with reading(request) as conn:
            lines = await message_batches.ended_lines(conn, batch.id)
    num_requests = batch.num_total or await _num_requests(request, batch)
    return batch_object(batch, num_requests, lines)


async def _num_requests(request: web.Request, batch: BatchInfo) -> int:
    """Counts the requests of a batch whose lines nobody has read yet. Where its input has expired nobody ever will: 0."""
    try:
        reader = await downloads.of_batch(request, batch, "input")
    except errors.ApiError:
        return 0

    def count() -> int:
        return sum(part.count(b"\n") for part in reader.parts())

    with closing(reader):
        counts = request.app[LINE_COUNTS]
        return await counts.of(batch.tenant_id, batch.input_file_id, lambda: asyncio.to_thread(count))


def _id(request: web.Request) -> str:
    return request.match_info["batch"]


ROUTES = [
    Route("POST", PATH, create, "batch", MAX_JSON_BYTES, takes=NewMessageBatch),
    Route("GET", PATH, list_all, "batch"),
    Route("GET", f"{PATH}/{{batch}}", retrieve, "batch"),
    Route("POST", f"{PATH}/{{batch}}/cancel", cancel, "batch"),
    Route("GET", f"{PATH}/{{batch}}/results", results, "batch"),
    Route("DELETE", f"{PATH}/{{batch}}", delete, "batch"),
]
