"""`/v1/batches`: create, retrieve, list, cancel; `/admin/v1/batches`: the same of all tenants, but create. The routes are
thin: the jobs process runs batches; it is woken here and reads SQL.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from aiohttp import web
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.batches import batches
from accounting.batches.batches import BatchInfo
from accounting.prices import prices
from accounting.requests import batch_results
from accounting.requests.batch_results import LineFailures
from accounting.values import clock
from gateway.base import errors
from gateway.base.jobs_notifier import JOBS_NOTIFIER
from gateway.base.lifecycle import uninterrupted
from gateway.http import body
from gateway.http.auth import PRINCIPAL
from gateway.http.route_table import Route
from gateway.http.sql import reading, writing
from gateway.idempotency import creations
from gateway.intake.fingerprints import fingerprint
from gateway.intake.json_body import decode_stored
from gateway.routes.admin import known_of, only_of
from gateway.schema import query
from gateway.schema.batches import NewBatch, batch_object
from gateway.schema.organization import listing, reply
from gateway.telemetry.keys import RECORD

MAX_BODY_BYTES = 64 * 1024
SCOPES = {"/v1/embeddings": "embeddings"}
"""The scopes of the endpoints that a batch may have. It is `chat` for those that are not named."""


async def create(request: web.Request) -> web.Response:
    """Makes a batch of an uploaded file of requests."""
    value = decode_stored(await body.read(request, MAX_BODY_BYTES))
    fields = known_of(request, value, NewBatch)
    principal = request[PRINCIPAL]
    if SCOPES.get(fields.endpoint, "chat") not in principal.scopes:
        raise errors.forbidden("insufficient_scope", "This key may not use the batch's endpoint.")
    expiry = fields.output_expires_after

    async def known_by() -> bytes:
        return fingerprint(request.path, value)

    async def create_in(conn: AsyncConnection) -> dict[str, Any]:
        batch = await batches.create(
            conn,
            principal.tenant_id,
            principal.key_id,
            input_file_id=fields.input_file_id,
            endpoint=fields.endpoint,
            completion_window=fields.completion_window,
            now=int(time.time()),
            invalid_lines=fields.headgate.invalid_lines,
            metadata=fields.metadata,
            traceparent=request[RECORD].outgoing_traceparent,
            output_expires_after_s=expiry.seconds if expiry else None,
        )
        [charge] = await _charges(conn, [batch])
        return _object(request, batch, charge)

    answer, is_replay = await uninterrupted(creations.once(request, known_by, create_in))
    await request.app[JOBS_NOTIFIER].notify(request[RECORD].outgoing_traceparent)
    return creations.reply(answer, is_replay)


async def retrieve(request: web.Request) -> web.Response:
    """Shows a batch."""
    async with reading(request) as conn:
        batch = await batches.get(conn, only_of(request), _id(request))
        [charge] = await _charges(conn, [batch])
        failures = await batch_results.failures(conn, batch.id) if batch.num_failed else []
    return _reply(request, batch, charge, failures)


async def list_batches(request: web.Request) -> web.Response:
    """Lists batches, the newest first."""
    asked, owner = request.query, only_of(request)
    async with reading(request) as conn:
        page = await batches.list_batches(
            conn,
            query.text(asked, "project_id") if owner is None else owner,
            running=query.choice(asked, "state", ("running", "any")) == "running",
            after=query.text(asked, "after"),
            limit=query.limit(asked, 20, 100),
        )
        charges = await _charges(conn, page.items)
    data = [_object(request, batch, charge) for batch, charge in zip(page.items, charges, strict=True)]
    return reply(listing(data, page.has_more))


async def cancel(request: web.Request) -> web.Response:
    """Cancels a batch."""
    async with writing(request, changes_identities=False) as conn:
        actor = request[PRINCIPAL].key_id
        batch = await batches.cancel(conn, only_of(request), _id(request), int(time.time()), actor=actor)
        [charge] = await _charges(conn, [batch])
    await request.app[JOBS_NOTIFIER].notify(request[RECORD].outgoing_traceparent)
    return _reply(request, batch, charge)


Charge = tuple[int, str]
"""A batch's cost so far: micro-units, and their currency."""


async def _charges(conn: AsyncConnection, found: Sequence[BatchInfo]) -> list[Charge]:
    currencies = await prices.currencies(conn, {batch.tenant_id for batch in found}, clock.now_ms())
    return [(await batches.charge(conn, batch.id), currencies[batch.tenant_id]) for batch in found]


def _reply(
    request: web.Request, batch: BatchInfo, charge: Charge, failures: Sequence[LineFailures] | None = None
) -> web.Response:
    return reply(_object(request, batch, charge, failures))


def _object(
    request: web.Request, batch: BatchInfo, charge: Charge, failures: Sequence[LineFailures] | None = None
) -> dict[str, Any]:
    owner = {} if only_of(request) else {"project_id": batch.tenant_id}
    return batch_object(batch, *charge, int(time.time()), failures) | owner


def _id(request: web.Request) -> str:
    return request.match_info["batch"]


ROUTES = [
    Route("POST", "/v1/batches", create, "batch", MAX_BODY_BYTES, takes=NewBatch),
    # A batch shows counts, cost and what its client named it, as the request log does, and no text of a line.
    Route("GET", "/v1/batches", list_batches, "batch", or_scope="usage:read"),
    Route("GET", "/v1/batches/{batch}", retrieve, "batch", or_scope="usage:read"),
    Route("POST", "/v1/batches/{batch}/cancel", cancel, "batch", MAX_BODY_BYTES),
    Route("GET", "/admin/v1/batches", list_batches, "admin"),
    Route("GET", "/admin/v1/batches/{batch}", retrieve, "admin"),
    Route("POST", "/admin/v1/batches/{batch}/cancel", cancel, "admin", MAX_BODY_BYTES),
]
