"""Stored responses in SQL, for handlers: all of them are the calling tenant's. Raises `ApiError` 404 and 503."""

from __future__ import annotations

import time
from collections.abc import Collection

from aiohttp import web
from sqlalchemy.exc import SQLAlchemyError

from accounting.responses import stored
from accounting.responses.stored import StoredResponse
from gateway.base import errors
from gateway.base.app_keys import DATABASE
from gateway.base.lifecycle import uninterrupted
from gateway.http.auth import PRINCIPAL
from gateway.http.sql import reading, translated, writing
from gateway.idempotency.data_keys import DATA_KEYS
from gateway.responses.texts import ResponseTexts


async def texts_of(request: web.Request) -> ResponseTexts:
    """Returns the texts of the calling tenant."""
    try:
        return ResponseTexts(await request.app[DATA_KEYS].key(request[PRINCIPAL].tenant_id))
    except (SQLAlchemyError, OSError) as error:
        raise errors.database_unavailable("Stored responses cannot be read or written now.") from error


async def find(request: web.Request, response_id: str) -> StoredResponse:
    """Returns a response. An unknown one, an expired one and another tenant's are one 404."""
    async with reading(request) as conn:
        row = await stored.find(conn, request[PRINCIPAL].tenant_id, _storable(response_id), int(time.time()))
    if row is None:
        raise _not_found()
    return row


async def chain(request: web.Request, response_id: str) -> list[StoredResponse]:
    """Returns the response and all before it, the oldest first; nothing if it does not exist."""
    async with reading(request) as conn:
        return await stored.chain(conn, request[PRINCIPAL].tenant_id, _storable(response_id), int(time.time()))


async def chain_bytes(request: web.Request, response_id: str) -> int:
    """Returns the bytes of the items of the response and of all before it; 0 if it does not exist."""
    async with reading(request) as conn:
        return await stored.chain_bytes(conn, request[PRINCIPAL].tenant_id, _storable(response_id), int(time.time()))


async def own_bytes(request: web.Request, response_ids: Collection[str]) -> int:
    """Returns the bytes of these responses' own items."""
    async with reading(request) as conn:
        return await stored.own_bytes(conn, request[PRINCIPAL].tenant_id, response_ids, int(time.time()))


async def several(request: web.Request, response_ids: Collection[str]) -> list[StoredResponse]:
    """Returns those of the responses that exist."""
    async with reading(request) as conn:
        return await stored.several(conn, request[PRINCIPAL].tenant_id, response_ids, int(time.time()))


async def insert(request: web.Request, row: StoredResponse) -> None:
    async def write() -> None:
        async with request.app[DATABASE].write() as conn:
            await stored.insert(conn, row)

    with translated():
        await uninterrupted(write())


async def remove(request: web.Request, response_id: str) -> None:
    async with writing(request, changes_identities=False) as conn:
        if not await stored.remove(conn, request[PRINCIPAL].tenant_id, _storable(response_id), int(time.time())):
            raise _not_found()


def _storable(response_id: str) -> str:
    """Returns the id, or one that nobody has: PostgreSQL takes no null character."""
    return "" if "\0" in response_id else response_id


def _not_found() -> errors.ApiError:
    return errors.not_found("The response does not exist, has expired, or was deleted.")
