"""Responses in the background: they are stored before they run, and read, streamed and cancelled while they do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from accounting.access import principals
from accounting.batches.claims import now_ms
from accounting.responses import runs, stored
from accounting.responses.runs import Claim, Packet
from accounting.responses.stored import StoredResponse
from accounting.values import ids
from gateway.base import errors
from gateway.base.app_keys import DETACHED, LIFECYCLE, RUNNING, SETTINGS
from gateway.http.auth import PRINCIPAL
from gateway.http.body import NUM_BODY_BYTES
from gateway.http.middleware import refuse_suspended
from gateway.http.sql import reading, writing
from gateway.http.sse import RESPONSES, EventStream
from gateway.intake.intake import SHARE
from gateway.responses import background, past, store
from gateway.responses.background import Planned, own_request, packet_of
from gateway.responses.texts import ResponseTexts
from gateway.routes import common
from gateway.routes.response_plans import Checked, check, plan_chat, row_of, stores, writer_of
from gateway.schema import query
from gateway.telemetry.keys import RECORD

POLL_S, MAX_POLL_S, PING_S = 0.2, 1.6, 15.0
"""The times between two looks at SQL for more events, and after which a silent stream is pinged."""
STOP_S = 10.0
"""The time that a cancel waits for the end of the run."""
PACKETS_AT_ONCE = 64


async def create(request: web.Request, value: dict[str, Any]) -> web.StreamResponse:
    if request[PRINCIPAL].kind == "batch":
        raise errors.invalid("A batch line cannot run in the background.", "background", "unsupported_parameter")
    request[RECORD].background = "created"
    own = own_request(request)
    checked = await check(own, value)
    stores(own, checked.fields)
    planned = await _planned(own, checked, ids.new_id("resp"), int(time.time()))
    row = await _insert(request, checked, planned)
    work = background.run(own, row.id, _plan, planned)
    _ = request.app[DETACHED].spawn(work, "run a response in the background")
    return (
        await stream(request, row, checked.texts) if checked.fields.stream else await shown(request, row, checked.texts)
    )


async def _planned(request: web.Request, checked: Checked, response_id: str, created_at: int) -> Planned:
    made = await plan_chat(request, checked)
    writer = writer_of(checked, made, response_id, is_stored=True, created_at=created_at)
    return Planned(request, made, writer, checked.texts)


async def _plan(request: web.Request, claim: Claim) -> Planned:
    """Returns the plan of a further run, for key and tenant as they are now. Raises `ApiError`."""
    row = claim.response
    async with reading(request) as conn:
        principal = await principals.of_run(conn, row.id, int(time.time()))
    if principal is None:
        raise errors.unauthorized()
    if "chat" not in principal.scopes:
        raise errors.forbidden("insufficient_scope", "This API key may not do this.")
    refuse_suspended(principal)
    request[PRINCIPAL] = principal
    request[NUM_BODY_BYTES] = await store.own_bytes(request, {row.id})
    asked = await common.aside(request, past.read_asked, await store.texts_of(request), row)
    with request[SHARE].held():  # the request that asked for the run has ended
        return await _planned(request, await check(request, asked.whole), row.id, row.created_at)


async def _insert(request: web.Request, checked: Checked, planned: Planned) -> StoredResponse:
    """Stores a response that waits, with its first events. Raises `ApiError` 429 if too many of the tenant's do."""
    tenant_id, body = request[PRINCIPAL].tenant_id, planned.writer.response("queued")
    events = planned.writer.waiting()
    row = await common.aside(request, row_of, request, checked, body, body["created_at"], is_background=True)
    row = msgspec.structs.replace(row, next_number=len(events))
    packet = packet_of(checked.texts, row.id, events)
    assert packet is not None
    async with writing(request, changes_identities=False) as conn:
        if await runs.num_running(conn, tenant_id) >= runs.MAX_RUNNING:
            raise _too_many()
        await stored.insert(conn, row)
        await runs.first_events(conn, row, packet)
    return row


def _too_many() -> errors.ApiError:
    return errors.ApiError(
        429,
        f"At most {runs.MAX_RUNNING} responses of a project may wait or run in the background.",
        type="concurrency",
        code="rate_limit_exceeded",
        headers=errors.retry_headers(5_000),
    )


async def shown(request: web.Request, row: StoredResponse, texts: ResponseTexts) -> web.Response:
    """Returns the Response object as it is now."""
    request[NUM_BODY_BYTES] = row.chain_bytes
    return web.Response(body=await common.aside(request, _body, row, texts), content_type="application/json")


def _body(row: StoredResponse, texts: ResponseTexts) -> bytes:
    assert row.body is not None
    body = texts.unpack(row.id, "body", row.body)
    if not row.has_ended:
        body = msgspec.json.encode(msgspec.json.decode(body) | {"status": row.state})
    return body


async def run(request: web.Request) -> web.Response:
    """Starts the run of a response that nobody runs. A jobs process asks for it, once a run has ended without an end."""
    row = await store.find(request, request.match_info["response_id"])
    work = background.run(own_request(request), row.id, _plan)
    _ = request.app[DETACHED].spawn(work, "run a response in the background")
    return web.Response(body=b"{}", content_type="application/json", status=202)


async def cancel(request: web.Request) -> web.Response:
    """Ends the run; what it has computed is charged. A response that has ended stays as it is."""
    row = await store.find(request, request.match_info["response_id"])
    texts = await store.texts_of(request)
    if not row.is_background:
        raise errors.invalid("Only a response in the background can be cancelled.", "response_id")
    if not row.has_ended:
        assert row.body is not None
        body = texts.decoded(row.id, "body", row.body) | {"status": "cancelled"}
        sealed = texts.pack(row.id, "body", msgspec.json.encode(body))
        async with writing(request, changes_identities=False) as conn:
            await runs.stop(conn, row, sealed, await now_ms(conn))
        row = await _until_it_has_ended(request, row)
    return await shown(request, row, texts)


async def _until_it_has_ended(request: web.Request, row: StoredResponse) -> StoredResponse:
    deadline = time.monotonic() + STOP_S
    while True:
        row = await store.find(request, row.id)
        if row.has_ended or time.monotonic() > deadline:
            return row
        await asyncio.sleep(POLL_S)


async def stream(request: web.Request, row: StoredResponse, texts: ResponseTexts) -> web.StreamResponse:
    """Streams the events of a response in the background, those after `starting_after`, until its end."""
    number = query.integer(request.query, "starting_after")
    if not row.is_background:
        raise errors.invalid("Only a response in the background can be streamed again.", "stream")
    number = -1 if number is None else number
    out = EventStream(request, request.app[SETTINGS].write_timeout_s, style=RESPONSES)
    events = await _events(request, row, texts, number)  # before the head leaves: a database that is away is a 503
    await out.start({})
    silent_s, pause_s = 0.0, POLL_S
    principal = request[PRINCIPAL]
    ended: list[errors.ApiError] = []
    end = ended.append
    request.app[RUNNING].add(principal, end)
    try:
        while True:
            if ended:
                raise ended[0]
            if events:
                number, pause_s = events[-1]["sequence_number"], POLL_S
                await out.send(*events)
            elif row.has_ended:
                return await out.close()
            elif request.app[LIFECYCLE].is_leaving:
                return await out.close(done=False)
            else:
                silent_s = 0.0 if silent_s > PING_S else silent_s + pause_s
                if silent_s > PING_S:
                    await out.ping()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_POLL_S)
                row = await store.find(request, row.id)
            events = await _events(request, row, texts, number)
    except errors.ApiError as error:
        return await out.close(_cut_event(error, number + 1), done=False)
    finally:
        request.app[RUNNING].discard(principal, end)


def _cut_event(error: errors.ApiError, number: int) -> dict[str, Any]:
    """Returns the last event of a stream whose response was deleted or cannot be read now, or whose key has ended."""
    return {"type": "error", "code": error.code, "message": error.message, "param": None, "sequence_number": number}


async def _events(request: web.Request, row: StoredResponse, texts: ResponseTexts, number: int) -> list[Any]:
    """Returns some events after `number`. `row` was read before, so an ended one has all its events."""
    async with reading(request) as conn:
        packets = await runs.events_after(conn, row.id, number, PACKETS_AT_ONCE)
    request[NUM_BODY_BYTES] = sum(len(packet.events) for packet in packets)
    events = await common.aside(request, _decoded, texts, row.id, packets)
    return [event for event in events if event["sequence_number"] > number]


def _decoded(texts: ResponseTexts, response_id: str, packets: Sequence[Packet]) -> list[Any]:
    return [event for packet in packets for event in texts.decoded(response_id, "events", packet.events)]
