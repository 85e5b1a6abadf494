"""One Idempotency-Key runs once: its answer is stored before it is settled, and replayed free of charge.

So far keys are for batch lines alone. A keyed request outlives its client. It is charged if and only if its answer was
stored: a crash in between is healed by the journal's replay, which takes the posting from the stored answer (`metering.py`).
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web
from sqlalchemy.exc import SQLAlchemyError

from accounting import replies, sealing
from gateway import errors
from gateway.claimed_key import ClaimedKey, line_ended
from gateway.keys import (
    CLAIMED_KEY,
    DATABASE,
    DETACHED,
    LIFECYCLE,
    PRINCIPAL,
    RECORD,
    SEALS,
    SETTINGS,
)

RUNNING_RETRY_MS = 1_000


async def once(
    request: web.Request,
    value: Mapping[str, Any],
    line: tuple[str, int] | None,
    run: Callable[[], Awaitable[web.StreamResponse]],
) -> web.StreamResponse:
    """`run`, unless the request's key has run or runs. `line`: the batch line that the key names; None: no key.
    Raises `ApiError`."""
    if line is None:
        return await run()
    if value.get("stream"):
        raise errors.invalid("A batch line cannot be streamed.", "stream", "unsupported_parameter")
    database, principal = request.app[DATABASE], request[PRINCIPAL]
    key, fingerprint = replies.line_key(*line), _fingerprint(request, value)
    try:
        data_key = await request.app[SEALS].key(principal.tenant_id)
        async with database.write() as conn:
            known = await replies.take(
                conn, principal.tenant_id, key, fingerprint=fingerprint, request_id=request[RECORD].request_id,
                slot=request.app[SETTINGS].slot, now=int(time.time()), line=line,
            )  # fmt: skip
    except replies.KeyClosed:
        raise line_ended() from None
    except (SQLAlchemyError, OSError) as error:
        # No promise that cannot be kept.
        raise errors.unavailable(
            "database_unavailable", "Idempotency keys cannot be checked now."
        ) from error
    if known is not None:
        return _replay(known, fingerprint, data_key, key)
    claimed = ClaimedKey(database, principal.tenant_id, key, request[RECORD].request_id, data_key)
    request[CLAIMED_KEY] = claimed
    task = request.app[DETACHED].spawn(_to_its_end(request, claimed, run), "keyed request")
    ended: web.StreamResponse | errors.ApiError = await asyncio.shield(task)
    if isinstance(ended, errors.ApiError):
        raise ended
    return ended


async def _to_its_end(
    request: web.Request,
    claimed: ClaimedKey,
    run: Callable[[], Awaitable[web.StreamResponse]],
) -> web.StreamResponse | errors.ApiError:
    """Whatever becomes of the client. A refusal is a value here: nobody may be left to hear it."""
    with request.app[LIFECYCLE].running():
        try:
            return await run()
        except errors.ApiError as refusal:
            return refusal
        finally:
            if not claimed.is_stored:
                await claimed.drop()


def _replay(
    known: replies.Known, fingerprint: bytes, data_key: bytes, key: str
) -> web.StreamResponse:
    if known.fingerprint != fingerprint:
        raise errors.ApiError(
            422,
            "The Idempotency-Key was used with another request.",
            code="idempotency_mismatch",
        )
    if known.stored is None:
        raise errors.ApiError(
            409, "A request with this Idempotency-Key is running.", code="idempotency_in_progress",
            headers=errors.retry_headers(RUNNING_RETRY_MS),
        )  # fmt: skip
    return web.Response(
        status=known.stored.status,
        body=sealing.unseal(data_key, known.stored.body, key.encode()),
        content_type="application/json",
        headers={"idempotent-replayed": "true"},
    )


def _fingerprint(request: web.Request, value: Mapping[str, Any]) -> bytes:
    """Canonical body and path; the tenant is in the key's row."""
    canonical = msgspec.json.encode(value, order="deterministic")
    return hashlib.sha256(request.path.encode() + b"\0" + canonical).digest()
