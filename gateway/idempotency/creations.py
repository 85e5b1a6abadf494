"""A request that creates something in SQL, once for each Idempotency-Key.

The claim of the key, what is created and the stored answer are one transaction. So a key is never left running here, a
crash leaves all of it or nothing, and a repeat that comes at the same moment waits for the database and gets the answer.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database import sealing
from accounting.requests import idempotency_store
from gateway.base.app_keys import SETTINGS
from gateway.http.auth import PRINCIPAL
from gateway.http.sql import translated, writing
from gateway.idempotency.data_keys import DATA_KEYS
from gateway.idempotency.idempotency import REPLAYED, no_room, own_key, stored_answer
from gateway.telemetry.keys import RECORD

Create = Callable[[AsyncConnection], Awaitable[Mapping[str, Any]]]
"""Creates the object in the transaction, and returns it as clients see it."""


async def once(
    request: web.Request, known_by: Callable[[], Awaitable[bytes]], create: Create, *, changes_identities: bool = False
) -> tuple[bytes, bool]:
    """Returns the answer as JSON, and whether it is the stored one of an earlier request. `known_by` makes the
    request's fingerprint, which only a key needs. `changes_identities` is that of `writing`. Raises `ApiError`.
    """
    key = own_key(request)
    if key is None:
        async with writing(request, changes_identities=changes_identities) as conn:
            return msgspec.json.encode(await create(conn)), False
    tenant_id, request_id = request[PRINCIPAL].tenant_id, request[RECORD].request_id
    fingerprint = await known_by()
    with translated():
        data_key = await request.app[DATA_KEYS].key(tenant_id)
    try:
        async with writing(request, changes_identities=changes_identities) as conn:
            known = await idempotency_store.take(
                conn,
                tenant_id,
                key,
                fingerprint=fingerprint,
                request_id=request_id,
                slot=request.app[SETTINGS].slot,
                now=int(time.time()),
            )
            if known is None:
                answer = msgspec.json.encode(await create(conn))
                sealed = sealing.seal(data_key, answer, key.encode())
                await idempotency_store.store(
                    conn, tenant_id, key, request_id=request_id, status=200, body=sealed, postings=()
                )
                return answer, False
    except idempotency_store.NoRoom as refusal:
        raise no_room(refusal, tenant_id) from None
    stored, answer = stored_answer(known, fingerprint, data_key, key)
    request[RECORD].replayed = stored.request_id
    return answer, True


def reply(answer: bytes, is_replay: bool) -> web.Response:
    headers = REPLAYED if is_replay else None
    return web.Response(body=answer, content_type="application/json", headers=headers)
