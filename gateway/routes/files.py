"""`/v1/files`: upload, list, retrieve, content, delete. The routes are thin: accounting keeps the rows, and the file
store the bytes.
"""

from __future__ import annotations

import asyncio
import re
import time

from aiohttp import web

from accounting.batches import files, registration
from accounting.batches.file_store import Reader, Writer
from accounting.batches.files import DEFAULT_EXPIRY_S, MAX_EXPIRY_S, MIN_EXPIRY_S
from gateway.base import errors
from gateway.base.app_keys import DATABASE, FILES
from gateway.base.lifecycle import uninterrupted
from gateway.http.auth import PRINCIPAL
from gateway.http.route_table import Route
from gateway.http.sql import reading, writing
from gateway.http.upload import Receiver, Upload
from gateway.idempotency.data_keys import DATA_KEYS
from gateway.routes import downloads
from gateway.schema import query
from gateway.schema.batches import file_object
from gateway.schema.organization import listing, reply

MIB = 1024 * 1024
MAX_BYTES = {
    "batch": 200 * MIB,
    "user_data": 512 * MIB,
    "assistants": 512 * MIB,
    "fine-tune": 512 * MIB,
    "vision": 512 * MIB,
    "evals": 512 * MIB,
}
"""The most bytes of a file, by purpose. Only Headgate itself makes `batch_output`."""
MAX_BODY_BYTES = 513 * MIB
TENANT_BYTES = 10 * 1024 * MIB
_NUMBER = re.compile(r"\d{1,9}", re.ASCII)


async def create(request: web.Request) -> web.Response:
    """Stores an uploaded file."""
    tenant_id = request[PRINCIPAL].tenant_id
    # This check saves clients a useless upload; the quota is enforced where the file is registered.
    async with reading(request) as conn:
        room = TENANT_BYTES - await files.tenant_bytes(conn, tenant_id)
    data_key = await request.app[DATA_KEYS].key(tenant_id)
    writer = await asyncio.to_thread(request.app[FILES].create, data_key)
    receiver = Receiver(request, writer, MAX_BYTES, room)
    try:
        try:
            upload = await receiver.receive()
            purpose, expires_after_s = _purpose(upload), _expiry(upload)
        except BaseException:
            writer.abort()
            raise
        # A client that leaves meanwhile changes nothing: the bytes are kept if and only if their row is there.
        return reply(await uninterrupted(_keep(request, writer, upload, purpose, expires_after_s)))
    finally:
        receiver.end()


async def _keep(
    request: web.Request, writer: Writer, upload: Upload, purpose: str, expires_after_s: int
) -> dict[str, object]:
    """Makes the bytes durable, then their row."""
    may_be_registered = False
    try:
        sha256 = await asyncio.to_thread(writer.finish)
        async with writing(request, changes_identities=False) as conn:
            may_be_registered = True
            info = await files.create(
                conn,
                request[PRINCIPAL].tenant_id,
                purpose=purpose,
                name=upload.name,
                num_bytes=writer.num_bytes,
                sha256=sha256,
                storage_key=writer.storage_key,
                now=int(time.time()),
                expires_after_s=expires_after_s,
                actor=request[PRINCIPAL].key_id,
                most_bytes=TENANT_BYTES,
            )
    except BaseException:
        writer.abort()  # a thread that still finishes the file can do it no more
        if may_be_registered:
            await registration.discard(request.app[DATABASE], request.app[FILES], writer.storage_key)
        else:
            request.app[FILES].delete(writer.storage_key)
        raise
    return file_object(info)


def _purpose(upload: Upload) -> str:
    purpose = upload.fields.get("purpose")
    if purpose is None:
        raise errors.invalid("Missing required parameter: 'purpose'.", "purpose", "missing_required_parameter")
    if purpose not in MAX_BYTES:
        raise errors.invalid(f"'purpose' must be one of {', '.join(MAX_BYTES)}.", "purpose")
    return purpose


def _expiry(upload: Upload) -> int:
    anchor = upload.fields.get("expires_after[anchor]")
    seconds = upload.fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return DEFAULT_EXPIRY_S
    if anchor != "created_at":
        raise errors.invalid("The anchor must be 'created_at'.", "expires_after.anchor")
    if seconds is None or not _NUMBER.fullmatch(seconds):
        raise errors.invalid("The seconds must be an integer.", "expires_after.seconds")
    if not MIN_EXPIRY_S <= int(seconds) <= MAX_EXPIRY_S:
        raise errors.invalid(f"The seconds must be {MIN_EXPIRY_S} to {MAX_EXPIRY_S}.", "expires_after.seconds")
    return int(seconds)


async def list_files(request: web.Request) -> web.Response:
    """Lists files."""
    async with reading(request) as conn:
        page = await files.list_files(
            conn,
            request[PRINCIPAL].tenant_id,
            int(time.time()),
            purpose=query.text(request.query, "purpose"),
            after=query.text(request.query, "after"),
            limit=query.limit(request.query, 10_000, 10_000),
            oldest_first=query.choice(request.query, "order", ("asc", "desc")) == "asc",
        )
    return reply(listing([file_object(file) for file in page.items], page.has_more))


async def retrieve(request: web.Request) -> web.Response:
    """Shows what is known of a file, without its bytes."""
    async with reading(request) as conn:
        file = await files.get(conn, request[PRINCIPAL].tenant_id, request.match_info["file"], int(time.time()))
    return reply(file_object(file))


async def content(request: web.Request) -> web.StreamResponse:
    """Sends the file's bytes unchanged, with headers that keep a browser from interpreting them."""
    async with reading(request) as conn:
        file = await files.get(conn, request[PRINCIPAL].tenant_id, request.match_info["file"], int(time.time()))
    reader = await downloads.opened(request, file)
    try:
        return await _send(request, reader, file.num_bytes)
    finally:
        reader.close()


async def _send(request: web.Request, reader: Reader, num_bytes: int) -> web.StreamResponse:
    response = web.StreamResponse(
        headers={
            "content-type": "application/octet-stream",
            "content-disposition": "attachment",
            "x-content-type-options": "nosniff",
        }
    )
    response.content_length = num_bytes
    await response.prepare(request)
    sent = 0
    while sent < num_bytes:
        part = await asyncio.to_thread(reader.read, sent, MIB)
        if not part:
            raise OSError("a stored file is shorter than its row says")
        await downloads.send(request, response, part)
        sent += len(part)
    await response.write_eof()
    return response


async def delete(request: web.Request) -> web.Response:
    """Deletes a file."""
    file_id = request.match_info["file"]
    async with writing(request, changes_identities=False) as conn:
        principal = request[PRINCIPAL]
        now = int(time.time())
        await files.delete(conn, principal.tenant_id, file_id, now, actor=principal.key_id)
    return reply({"id": file_id, "object": "file", "deleted": True})


ROUTES = [
    Route("POST", "/v1/files", create, "files:write", MAX_BODY_BYTES, json_body=False),
    Route("GET", "/v1/files", list_files, "files:read"),
    Route("GET", "/v1/files/{file}", retrieve, "files:read"),
    Route("GET", "/v1/files/{file}/content", content, "files:read"),
    Route("DELETE", "/v1/files/{file}", delete, "files:write"),
]
