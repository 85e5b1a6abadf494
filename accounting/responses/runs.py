"""Runs of responses in the background: who runs one, its events, and its end.

The right to run a response for a limited time is a claim, as with chunks of batches (`accounting/batches/claims.py`).
Each claim raises the fence, and a run writes only while the fence is its own. A claim that is not renewed ends, and then
anybody may run the response anew.
"""

from __future__ import annotations

import msgspec
from sqlalchemy import ColumnElement, delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database.db import upsert
from accounting.responses.stored import RUNNING, State, StoredResponse, grow, of_row
from accounting.tables.response_models import Response, ResponseEvents

CLAIM_MS = 60_000
MAX_RUNNING = 100
"""The most responses of a tenant that wait or run in the background."""
NUM_WAITING = 2
"""The number of events of a response that waits for its first run."""


class Claim(msgspec.Struct, frozen=True):
    response: StoredResponse
    fence: int
    """The number of this run; the first is 1."""


class Packet(msgspec.Struct, frozen=True):
    """Neighbouring events, encrypted."""

    first_number: int
    events: bytes


async def claim(conn: AsyncConnection, response_id: str, now_ms: int) -> Claim | None:
    """Claims a response that waits, or whose run has ended without an end. The events of an earlier run are deleted,
    since this one sends its own. Returns None if there is nothing to run.
    """
    done = await conn.execute(
        update(Response)
        .where(Response.id == response_id, _is_due(now_ms))
        .values(state="in_progress", fence=Response.fence + 1, claimed_until_ms=now_ms + CLAIM_MS)
        .returning(*Response.__table__.c)
    )
    row = done.first()
    if row is None:
        return None
    run = Claim(of_row(row), row.fence)
    if run.fence > 1:
        await _drop_events(conn, run.response)
    return run


async def write(
    conn: AsyncConnection, run: Claim, packet: Packet | None, next_number: int, now_ms: int
) -> State | None:
    """Renews the claim and adds events. Returns "in_progress" while the run may go on, "cancelled" if it is to stop,
    and None if it may write nothing any more."""
    changed = await conn.execute(
        update(Response)
        .where(_is_mine(run))
        .values(claimed_until_ms=now_ms + CLAIM_MS, next_number=next_number)
        .returning(Response.is_stopping)
    )
    row = changed.first()
    if row is None:
        return "cancelled" if await is_gone(conn, run) else None
    await _add(conn, run.response, packet)
    return "cancelled" if row.is_stopping else "in_progress"


async def finish(
    conn: AsyncConnection,
    run: Claim,
    state: State,
    body: bytes,
    packet: Packet | None,
    next_number: int,
    chain_bytes: int,
) -> bool:
    """Writes the end of a response. Returns False if this run may not."""
    before = run.response
    values = {"state": state, "body": body, "next_number": next_number, "chain_bytes": before.chain_bytes + chain_bytes}
    done = await conn.execute(update(Response).where(_is_mine(run)).values(**values))
    if not done.rowcount:
        return False
    await grow(conn, before.tenant_id, before.id, len(body) - len(before.body or b""))
    await _add(conn, before, packet)
    return True


async def release(conn: AsyncConnection, run: Claim, not_before_ms: int) -> None:
    """Lets the response wait: it may be run again from then on."""
    values = {"state": "queued", "claimed_until_ms": not_before_ms}
    await conn.execute(update(Response).where(_is_mine(run)).values(**values))


async def stop(conn: AsyncConnection, response: StoredResponse, body: bytes, now_ms: int) -> bool:
    """Asks for the end of a run. Returns True if nothing runs: then the response is cancelled already, with `body`."""
    mine = (Response.id == response.id) & Response.state.in_(RUNNING)
    waits = mine & ((Response.state == "queued") | (Response.claimed_until_ms <= now_ms))
    done = await conn.execute(
        update(Response).where(waits).values(state="cancelled", body=body, fence=Response.fence + 1)
    )
    if done.rowcount:
        await grow(conn, response.tenant_id, response.id, len(body) - len(response.body or b""))
        return True
    await conn.execute(update(Response).where(mine).values(is_stopping=True))
    return False


async def num_running(conn: AsyncConnection, tenant_id: str) -> int:
    query = select(func.count()).where(Response.state.in_(RUNNING), Response.tenant_id == tenant_id)
    return int(await conn.scalar(query) or 0)


async def due(conn: AsyncConnection, now_ms: int, most: int, *, after: str = "") -> list[str]:
    """Returns responses that anybody may run now, by id and so the oldest first, those behind the response `after`."""
    query = select(Response.id).where(_is_due(now_ms), Response.id > after).order_by(Response.id)
    return list((await conn.execute(query.limit(most))).scalars())


async def first_events(conn: AsyncConnection, response: StoredResponse, packet: Packet) -> None:
    """Stores the events of a response that waits."""
    await _add(conn, response, packet)


async def events_after(conn: AsyncConnection, response_id: str, number: int, most: int) -> list[Packet]:
    """Returns packets with events after `number`. The first of them may begin before it."""
    mine = ResponseEvents.response_id == response_id
    first = select(func.max(ResponseEvents.first_number)).where(mine, ResponseEvents.first_number <= number + 1)
    behind = ResponseEvents.first_number >= func.coalesce(first.scalar_subquery(), 0)
    query = select(ResponseEvents.first_number, ResponseEvents.events).where(mine, behind)
    found = await conn.execute(query.order_by(ResponseEvents.first_number).limit(most))
    return [Packet(row.first_number, row.events) for row in found]


async def _add(conn: AsyncConnection, response: StoredResponse, packet: Packet | None) -> None:
    """Adds a packet. One of the same number is replaced: its COMMIT was unknown, and the events came again with
    more."""
    if packet is None:
        return
    events = ResponseEvents.__table__.c
    same = (events.response_id == response.id) & (events.first_number == packet.first_number)
    num_before = await conn.scalar(select(func.length(events.events)).where(same)) or 0
    values = {"response_id": response.id, "first_number": packet.first_number, "events": packet.events}
    statement = upsert(conn, ResponseEvents.__table__).values(**values)
    again = {"events": packet.events}
    await conn.execute(statement.on_conflict_do_update(index_elements=["response_id", "first_number"], set_=again))
    await grow(conn, response.tenant_id, response.id, len(packet.events) - num_before)


async def _drop_events(conn: AsyncConnection, response: StoredResponse) -> None:
    """Deletes the events of earlier runs; those of the wait stay."""
    events = ResponseEvents.__table__.c
    sent = (events.response_id == response.id) & (events.first_number >= NUM_WAITING)
    num_bytes = await conn.scalar(select(func.sum(func.length(events.events))).where(sent)) or 0
    if num_bytes:
        await conn.execute(delete(ResponseEvents).where(sent))
        await grow(conn, response.tenant_id, response.id, -num_bytes)


async def is_gone(conn: AsyncConnection, run: Claim) -> bool:
    """Returns whether the response was deleted or cancelled, and not taken over by another run."""
    state = await conn.scalar(select(Response.state).where(Response.id == run.response.id))
    return state in (None, "cancelled")


def _is_due(now_ms: int) -> ColumnElement[bool]:
    return Response.state.in_(RUNNING) & (Response.claimed_until_ms <= now_ms)


def _is_mine(run: Claim) -> ColumnElement[bool]:
    return (Response.id == run.response.id) & (Response.fence == run.fence) & (Response.state == "in_progress")
