"""Runs one Idempotency-Key once: its answer is stored before it is settled, and replayed free of charge.

A keyed request outlives its client. It is charged if and only if its answer was stored. A crash in between is repaired
by the journal's replay, or by the key's next request, which take the posting from the stored answer. Batch lines have
their own keys, which no other request may use.
"""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database import sealing
from accounting.database.db import Database
from accounting.requests import idempotency_store, quotes, request_postings, sdk_retries
from accounting.responses import stored as responses
from gateway.base import errors
from gateway.base.app_keys import DATABASE, DETACHED, LIFECYCLE, SETTINGS
from gateway.http import sse
from gateway.http.auth import PRINCIPAL
from gateway.idempotency import waits
from gateway.idempotency.claimed_key import CLAIMED_KEY, ClaimedKey, line_ended
from gateway.idempotency.data_keys import DATA_KEYS
from gateway.idempotency.retries import SDK_RETRY, SdkRetry
from gateway.intake.fingerprints import FINGERPRINT
from gateway.intake.intake import SHARE
from gateway.telemetry.keys import RECORD

logger = logging.getLogger(__name__)

REPLAYED = {"idempotent-replayed": "true"}
RUNNING_RETRY_MS = 1_000
MAX_KEY_LENGTH = 255
PIECE_BYTES = 256 * 1024
SWEEP_EVERY_S = 30.0
LOST_S = 60
"""The age from which claims are looked at: a younger claim may not be among the held ones yet."""


@dataclass(frozen=True)
class _Replay:
    stored: idempotency_store.Stored
    body: bytes


async def once(
    request: web.Request,
    value: Mapping[str, Any],
    line: tuple[str, int] | None,
    run: Callable[[], Awaitable[web.StreamResponse]],
) -> web.StreamResponse:
    """Calls `run`, unless the request's key has run or is running; a repeat waits for one that runs. `line` is the batch
    line that the key names. Raises `ApiError`.
    """
    key = own_key(request) if line is None else idempotency_store.line_key(*line)
    if key is None:
        # the fingerprint's method, not the request itself: the request holds this object
        known_by = request[FINGERPRINT].digest
        request[SDK_RETRY] = SdkRetry.of(request[RECORD].request_id, request[PRINCIPAL], request.headers, known_by)
        return await run()
    if line is not None and value.get("stream"):
        raise errors.invalid("A batch line cannot be streamed.", "stream", "unsupported_parameter")
    until = time.monotonic() + waits.MOST_S
    while True:
        task = request.app[DETACHED].spawn(_keyed(request, key, line, run), "keyed request")
        request[RECORD].settling = task
        ended: web.StreamResponse | _Replay | errors.ApiError = await asyncio.shield(task)
        if not isinstance(ended, errors.ApiError):
            return await _replay(request, ended) if isinstance(ended, _Replay) else ended
        may_wait = line is None and ended.code == "idempotency_in_progress"  # a batch's runner waits by itself
        if not may_wait or not await waits.ran_out(request, key, until):
            raise ended


def own_key(request: web.Request) -> str | None:
    """Returns the tenant's own key, or None if the request has none. Raises `ApiError` 400."""
    values = request.headers.getall("idempotency-key", ())
    if not values:
        return None
    (key, *more) = values
    if more or not 1 <= len(key) <= MAX_KEY_LENGTH or not (key.isascii() and key.isprintable()):
        raise errors.invalid(f"An Idempotency-Key is one header of 1 to {MAX_KEY_LENGTH} printable ASCII characters.")
    if key.startswith("batch:"):
        raise errors.invalid("This Idempotency-Key is reserved for batches.")
    return key


async def _keyed(
    request: web.Request, key: str, line: tuple[str, int] | None, run: Callable[[], Awaitable[web.StreamResponse]]
) -> web.StreamResponse | _Replay | errors.ApiError:
    """Runs whether the client stays or leaves. A refusal is a value here, because there may be no client to raise it
    to.
    """
    request_id, keyed = request[RECORD].request_id, request.app[KEYED]
    keyed.add(request_id)
    try:
        with request.app[LIFECYCLE].running(), request[SHARE].held():
            claimed = await _claim(request, key, request[FINGERPRINT].digest(), line)
            if isinstance(claimed, _Replay):
                return claimed
            return await _run(request, claimed, run)
    except errors.ApiError as refusal:
        return refusal
    finally:
        # The sweep may drop the key from here on, if dropping it has failed.
        keyed.discard(request_id)


async def _run(
    request: web.Request, claimed: ClaimedKey, run: Callable[[], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    request[CLAIMED_KEY] = claimed
    try:
        return await run()
    finally:
        if not claimed.is_stored:
            await _drop(claimed)


async def _drop(claimed: ClaimedKey) -> None:
    try:
        await claimed.drop()
    except (SQLAlchemyError, OSError) as error:
        logger.warning("a key that may run again is dropped by the next sweep: %s", error)


async def _claim(request: web.Request, key: str, body: bytes, line: tuple[str, int] | None) -> ClaimedKey | _Replay:
    """Claims the key, or returns the stored answer. Raises `ApiError`: 409, 422, 429, 503."""
    database, tenant_id = request.app[DATABASE], request[PRINCIPAL].tenant_id
    request_id, slot = request[RECORD].request_id, request.app[SETTINGS].slot
    try:
        data_key = await request.app[DATA_KEYS].key(tenant_id)
        async with database.write() as conn:
            known = await idempotency_store.take(
                conn,
                tenant_id,
                key,
                fingerprint=body,
                request_id=request_id,
                slot=slot,
                now=int(time.time()),
                line=line,
            )
            stored = None if known is None else known.stored
            if stored is not None:
                await _settle(conn, tenant_id, key, stored)
    except idempotency_store.KeyClosed:
        raise line_ended() from None
    except idempotency_store.NoRoom as refusal:
        raise no_room(refusal, tenant_id) from None
    except (SQLAlchemyError, OSError) as error:
        # The key's promise could not be kept, so none is made.
        raise errors.unavailable("database_unavailable", "Idempotency keys cannot be checked now.") from error
    if known is None:
        return ClaimedKey(database, tenant_id, key, request_id, data_key)
    return _Replay(*stored_answer(known, body, data_key, key))


def stored_answer(
    known: idempotency_store.Known, body: bytes, data_key: bytes, key: str
) -> tuple[idempotency_store.Stored, bytes]:
    """Returns the answer of a key that is taken, for the request with the fingerprint `body`. Raises `ApiError`."""
    if known.fingerprint != body:
        raise errors.ApiError(422, "The Idempotency-Key was used with another request.", code="idempotency_mismatch")
    if known.stored is None:
        raise errors.ApiError(
            409,
            "A request with this Idempotency-Key is running.",
            code="idempotency_in_progress",
            headers=errors.retry_headers(RUNNING_RETRY_MS),
        )
    return known.stored, sealing.unseal(data_key, known.stored.body, key.encode())


async def _settle(conn: AsyncConnection, tenant_id: str, key: str, stored: idempotency_store.Stored) -> None:
    """Settles a stored answer, if a crash came between the answer and its settlement."""
    if owed := await idempotency_store.owed(conn, tenant_id, key, stored):
        await request_postings.post_unshipped(conn, owed)


def no_room(refusal: idempotency_store.NoRoom, tenant_id: str) -> errors.ApiError:
    """Returns the error for a tenant that may have no more keys now."""
    wait_ms = max(1, refusal.until - int(time.time())) * 1000
    return errors.too_many(
        f"Too many {refusal.what} of stored answers for Idempotency-Keys in project {tenant_id}: "
        f"Limit {refusal.limit}, Used {refusal.used}.",
        wait_ms,
        code="idempotency_limit_exceeded",
        headgate={
            "level": "tenant",
            "dimension": f"idempotency_{refusal.what}",
            "limit": refusal.limit,
            "used": refusal.used,
            "resets_at": refusal.until,
        },
    )


async def _replay(request: web.Request, replay: _Replay) -> web.StreamResponse:
    stored, body = replay.stored, replay.body
    request[RECORD].replayed = stored.request_id
    headers = dict(REPLAYED)
    if stored.content_type is None:
        return web.Response(status=stored.status, body=body, content_type="application/json", headers=headers)
    stream = sse.EventStream(request, request.app[SETTINGS].write_timeout_s)
    await stream.start(headers)
    unpack = zlib.decompressobj()
    while body:
        await stream.write(unpack.decompress(body, PIECE_BYTES))
        body = unpack.unconsumed_tail
    if rest := unpack.flush():
        await stream.write(rest)
    return await stream.close(done=False)  # the stored events include `[DONE]`


async def sweep(database: Database, slot: int, keyed: set[str]) -> None:
    """Removes expired answers, keys of this slot without a running request, attempts that were not repeated, quotes,
    and stored responses that have expired.
    """
    now = time.time()
    await _purge(database, idempotency_store.purge, int(now))
    async with database.write() as conn:
        await idempotency_store.drop_lost(conn, slot, keyed, int(now) - LOST_S)
        await sdk_retries.forget(conn, int(now * 1000))
        await quotes.forget(conn, int(now * 1000))
    await _purge(database, responses.purge, int(now))


async def _purge(database: Database, purge: Callable[[AsyncConnection, int], Awaitable[bool]], now: int) -> None:
    """Deletes piece by piece until nothing is left that had expired `now`. Others write between two pieces."""
    may_be_more = True
    while may_be_more:
        async with database.write() as conn:
            may_be_more = await purge(conn, now)


KEYED = web.AppKey("keyed", set[str])
"""The ids of those requests of this process that run, or are about to run, under an Idempotency-Key."""
