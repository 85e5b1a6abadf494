"""Events for webhooks. An event is written in the transaction of the fact it reports: both are stored, or neither.

An event that no webhook listens to is not written. deliveries.py sends the rows.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from functools import cache
from typing import Any

from sqlalchemy import Row, Select, select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database.db import among_given, given, insert_new, upsert
from accounting.events import events
from accounting.events.events import Event
from accounting.tables.outbox_models import Installation, Outbox, Webhook
from accounting.values import clock
from accounting.values.types import OPERATOR_TENANT, LedgerRow


async def write(conn: AsyncConnection, told: Sequence[Event]) -> None:
    """Writes events for all webhooks that listen to them. A repeated event is written once. All are due now."""
    if listening := await _listening(conn, {event.tenant_id for event in told}):
        await _tell(conn, told, listening)


async def write_usage(conn: AsyncConnection, entries: Sequence[LedgerRow]) -> None:
    """Writes the events of settles and reversals. If no webhook listens, no event is made."""
    if listening := await _listening(conn, {entry["tenant_id"] for entry in entries}):
        await _tell(conn, [events.usage(entry) for entry in entries], listening)


async def _tell(conn: AsyncConnection, told: Sequence[Event], listening: Sequence[Row[Any]]) -> None:
    pairs = [
        (event, hook)
        for event in told
        for hook in listening
        if hook.tenant_id in (event.tenant_id, OPERATOR_TENANT) and (hook.events is None or event.type in hook.events)
    ]
    await _insert(conn, [(event, hook.id, hook.tenant_id, hook.is_tenants) for event, hook in pairs])


async def write_to(conn: AsyncConnection, event: Event, webhook_id: str, lane: str, is_tenants: bool) -> None:
    """Writes an event for one webhook, whatever types it listens to."""
    await _insert(conn, [(event, webhook_id, lane, is_tenants)])


async def source(conn: AsyncConnection) -> str:
    """Returns the name of this installation in CloudEvents. It is made when it is first needed."""
    query = select(Installation.uuid).where(Installation.id == 1)
    found = await conn.scalar(query)
    if found is None:
        statement = upsert(conn, Installation.__table__).values(id=1, uuid=str(uuid.uuid4()))
        await conn.execute(statement.on_conflict_do_nothing())
        found = await conn.scalar(query)
    return f"urn:headgate:{found}"


async def _listening(conn: AsyncConnection, tenant_ids: set[str]) -> Sequence[Row[Any]]:
    if not tenant_ids:
        return []
    query = _listening_of(conn.dialect.name)
    return list(await conn.execute(query, given(conn, {*tenant_ids, OPERATOR_TENANT})))


@cache
def _listening_of(dialect: str) -> Select[*tuple[Any, ...]]:
    query = select(Webhook.id, Webhook.tenant_id, Webhook.events, Webhook.is_tenants).where(
        among_given(dialect, Webhook.tenant_id), Webhook.is_full.is_(False)
    )
    # A webhook that is being removed at this moment is either locked here, so that its remover waits, or not found.
    return query.order_by(Webhook.id).with_for_update(read=True, key_share=True)


async def _insert(conn: AsyncConnection, addressed: Sequence[tuple[Event, str, str, bool]]) -> None:
    if not addressed:
        return
    here, now_ms = await source(conn), clock.now_ms()
    rows = [
        {
            "event_id": event.id,
            "webhook_id": webhook_id,
            "lane": lane,
            "is_tenants": is_tenants,
            "type": event.type,
            "body": events.body(event, here),
            "state": "pending",
            "attempts": 0,
            "deliver_after_ms": now_ms,
            "claimed_until_ms": 0,
            "created_at_ms": now_ms,
        }
        for event, webhook_id, lane, is_tenants in addressed
    ]
    await insert_new(conn, Outbox.__table__, rows, (Outbox.event_id,))
