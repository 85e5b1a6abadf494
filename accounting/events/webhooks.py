"""Webhooks: created, listed, tested, removed; every change is audited. The secret is shown once and encrypted at rest.

A tenant's webhook gets events of that tenant; one of the operator's gets events of every tenant.
"""

from __future__ import annotations

import base64
import hmac
import secrets
from collections.abc import Collection, Sequence
from hashlib import sha256
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec
from sqlalchemy import Row, delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database import audit, sealing
from accounting.database.db import upsert
from accounting.database.paging import Page, newest_first, one, shaped
from accounting.events import events, outbox
from accounting.events.egress import Egress
from accounting.events.events import Event
from accounting.tables.outbox_models import Outbox, OutboxLane, Webhook
from accounting.tenants import tenants
from accounting.values.errors import ConflictError, InvalidError
from accounting.values.ids import made_at, new_id
from accounting.values.types import OPERATOR_TENANT

MAX_PER_TENANT = 20
"""The webhooks that the operator makes for one tenant, or for all of them."""
MAX_OF_A_TENANT = 3
"""The webhooks that a tenant makes for itself. Each is a row more in the transaction that posts an ending."""
MAX_TESTS = 10
"""The test events of a webhook that may wait at once."""
SECRET_BYTES = 32
SECRET_PREFIX = "whsec_"  # noqa: S105 - Standard Webhooks' mark of a secret, not one


class Counts(msgspec.Struct, frozen=True):
    """The numbers of deliveries that are still stored."""

    pending: int = 0
    delivered: int = 0
    dead: int = 0
    last_error: str | None = None
    """The error of the latest delivery that has not succeeded."""


class WebhookInfo(msgspec.Struct, frozen=True):
    id: str
    tenant_id: str
    url: str
    events: tuple[str, ...] | None
    is_full: bool
    created_at: int
    is_tenants: bool
    """The tenant made it for itself."""
    counts: Counts = Counts()


class DeliveryInfo(msgspec.Struct, frozen=True):
    event_id: str
    type: str
    state: Literal["pending", "delivered", "dead"]
    attempts: int
    last_error: str | None
    created_at_ms: int
    deliver_after_ms: int


class NewWebhook(msgspec.Struct, frozen=True):
    info: WebhookInfo
    secret: str


async def create(
    conn: AsyncConnection,
    master: bytes,
    egress: Egress,
    *,
    url: str,
    types: Collection[str] | None,
    tenant_id: str,
    now: int,
    actor: str,
    is_tenants: bool = False,
) -> NewWebhook:
    """Creates a webhook. `types` is None for all events. With `is_tenants` the tenant itself makes it, so it may go to
    public addresses only. Raises NotFoundError, InvalidError, ConflictError.
    """
    if tenant_id != OPERATOR_TENANT:
        await tenants.living(conn, tenant_id)
    (Egress() if is_tenants else egress).check(url)
    _check_types(types)
    most = MAX_OF_A_TENANT if is_tenants else MAX_PER_TENANT
    same = select(func.count(Webhook.id)).where(Webhook.tenant_id == tenant_id, Webhook.is_tenants.is_(is_tenants))
    if int(await conn.scalar(same) or 0) >= most:
        raise ConflictError(f"There are at most {most} webhooks.")
    lane = upsert(conn, OutboxLane.__table__).values(tenant_id=tenant_id)
    await conn.execute(lane.on_conflict_do_nothing())
    webhook_id, secret = new_id("webhook"), secrets.token_bytes(SECRET_BYTES)
    await conn.execute(
        insert(Webhook).values(
            id=webhook_id,
            tenant_id=tenant_id,
            url=url,
            created_at=made_at("webhook", webhook_id),  # once the row is gone, paging finds the time in the id
            events=None if types is None else sorted(set(types)),
            secret=sealing.seal(_key(master), secret, webhook_id.encode()),
            is_tenants=is_tenants,
        )
    )
    await _record(conn, "created", tenant_id, webhook_id, url, now, actor)
    return NewWebhook(await get(conn, webhook_id), _shown(secret))


async def get(conn: AsyncConnection, webhook_id: str) -> WebhookInfo:
    row = await one(conn, _all().where(Webhook.id == webhook_id), "There is no such webhook.")
    return (await _with_counts(conn, [row]))[0]


async def list_webhooks(
    conn: AsyncConnection,
    *,
    tenant_id: str | None = None,
    only_tenants: bool = False,
    after: str | None = None,
    limit: int = 20,
) -> Page[WebhookInfo]:
    """Returns webhooks, newest first. With `only_tenants` those that tenants made for themselves."""
    query = _all() if tenant_id is None else _all().where(Webhook.tenant_id == tenant_id)
    if only_tenants:
        query = query.where(Webhook.is_tenants)
    # A removed webhook leaves no row, so its creation time is read from its id.
    gone = None if after is None else made_at("webhook", after)
    page = await newest_first(conn, query, Webhook, after, limit, created_at=gone)
    return Page(await _with_counts(conn, page.items), page.has_more)


async def list_deliveries(
    conn: AsyncConnection, webhook_id: str, *, state: str | None = None, event_id: str | None = None, limit: int = 20
) -> list[DeliveryInfo]:
    """Returns deliveries of a webhook, newest first."""
    await get(conn, webhook_id)
    names = DeliveryInfo.__struct_fields__
    query = select(*(getattr(Outbox, name) for name in names)).where(Outbox.webhook_id == webhook_id)
    if state is not None:
        query = query.where(Outbox.state == state)
    if event_id is not None:
        query = query.where(Outbox.event_id == event_id)
    query = query.order_by(Outbox.created_at_ms.desc(), Outbox.event_id).limit(limit)
    return [DeliveryInfo(*row) for row in await conn.execute(query)]


async def remove(conn: AsyncConnection, webhook_id: str, *, now: int, actor: str) -> None:
    """Removes a webhook and drops the deliveries that wait for it."""
    info = await get(conn, webhook_id)
    await conn.execute(select(Webhook.id).where(Webhook.id == webhook_id).with_for_update())
    await conn.execute(delete(Outbox).where(Outbox.webhook_id == webhook_id))
    await conn.execute(delete(Webhook).where(Webhook.id == webhook_id))
    await _record(conn, "deleted", info.tenant_id, webhook_id, info.url, now, actor)


async def remove_of_tenant(conn: AsyncConnection, tenant_id: str) -> None:
    """Removes the webhooks of an erased tenant; their addresses and secrets are deleted with them."""
    mine = select(Webhook.id).where(Webhook.tenant_id == tenant_id)
    await conn.execute(mine.with_for_update())
    await conn.execute(delete(Outbox).where(Outbox.lane == tenant_id))
    await conn.execute(delete(Webhook).where(Webhook.tenant_id == tenant_id))


async def test(conn: AsyncConnection, webhook_id: str, *, now_ms: int, actor: str) -> str:
    """Sends a test event to this webhook. Returns the event's id. Raises ConflictError where many events wait for
    it."""
    info = await get(conn, webhook_id)
    if info.is_full:
        raise ConflictError("So many events wait for this webhook that it takes no more now.")
    waiting = select(func.count()).where(
        Outbox.webhook_id == webhook_id, Outbox.type == events.TEST, Outbox.ended_at_ms.is_(None)
    )
    if int(await conn.scalar(waiting) or 0) >= MAX_TESTS:
        raise ConflictError(f"{MAX_TESTS} tests of this webhook still wait for their delivery.")
    event = Event(
        f"{webhook_id}/test/{secrets.token_hex(8)}", events.TEST, info.tenant_id, now_ms, {"webhook_id": webhook_id}
    )
    await outbox.write_to(conn, event, webhook_id, info.tenant_id, info.is_tenants)
    await _record(conn, "tested", info.tenant_id, webhook_id, info.url, now_ms // 1000, actor)
    return event.id


async def rewrap(conn: AsyncConnection, old: bytes, new: bytes) -> int:
    """Seals every secret with another master key. Returns how many there are. Raises SealBroken."""
    rows = (await conn.execute(select(Webhook.id, Webhook.secret))).all()
    for row in rows:
        sealed = sealing.seal(_key(new), signing_key(old, row.id, row.secret), row.id.encode())
        await conn.execute(update(Webhook).where(Webhook.id == row.id).values(secret=sealed))
    return len(rows)


async def is_wrapped(conn: AsyncConnection, master: bytes) -> bool | None:
    """Says whether secrets are sealed with this master key; one tells of all, because they change together. None means
    that there are none."""
    row = (await conn.execute(select(Webhook.id, Webhook.secret).limit(1))).first()
    return None if row is None else sealing.opens(_key(master), row.secret, row.id.encode())


def signing_key(master: bytes, webhook_id: str, sealed: bytes) -> bytes:
    """Returns the key that signs this webhook's deliveries. Raises SealBroken."""
    return sealing.unseal(_key(master), sealed, webhook_id.encode())


def sign(key: bytes, event_id: str, at: int, body: bytes) -> str:
    """Signs by Standard Webhooks, version 1: over the id, the time in Unix seconds and the body."""
    signed = f"{event_id}.{at}.".encode() + body
    return "v1," + base64.b64encode(hmac.digest(key, signed, sha256)).decode()


def _key(master: bytes) -> bytes:
    return hmac.digest(master, b"headgate webhook secrets", sha256)


def _shown(secret: bytes) -> str:
    return SECRET_PREFIX + base64.b64encode(secret).decode()


def _check_types(types: Collection[str] | None) -> None:
    if types is None:
        return
    unknown = sorted(set(types) - set(events.TYPES))
    if unknown or not types:
        known = ", ".join(one for one in events.TYPES if one != events.TEST)
        raise InvalidError(f"Events are a list of these, or left out: {known}.", "events")


def _all() -> Any:
    return select(Webhook.__table__)


async def _with_counts(conn: AsyncConnection, rows: Sequence[Row[Any]]) -> list[WebhookInfo]:
    counts = await _counts(conn, [row.id for row in rows])
    return [
        shaped(
            WebhookInfo,
            row,
            events=None if row.events is None else tuple(row.events),
            counts=counts.get(row.id, Counts()),
        )
        for row in rows
    ]


async def _counts(conn: AsyncConnection, ids: Sequence[str]) -> dict[str, Counts]:
    of_these = Outbox.webhook_id.in_(ids)
    query = select(Outbox.webhook_id, Outbox.state, func.count()).where(of_these)
    found: dict[str, dict[str, Any]] = {}
    for webhook_id, state, number in await conn.execute(query.group_by(Outbox.webhook_id, Outbox.state)):
        found.setdefault(webhook_id, {})[state] = number
    for webhook_id in found:
        latest = (
            select(Outbox.last_error)
            .where(Outbox.webhook_id == webhook_id, Outbox.state != "delivered", Outbox.last_error.is_not(None))
            .order_by(Outbox.created_at_ms.desc())
            .limit(1)
        )
        found[webhook_id]["last_error"] = await conn.scalar(latest)
    return {webhook_id: Counts(**values) for webhook_id, values in found.items()}


async def _record(
    conn: AsyncConnection, verb: str, tenant_id: str, webhook_id: str, url: str, now: int, actor: str
) -> None:
    """Audits a change. Only the host of the URL is recorded, as paths of receivers are often secrets."""
    await audit.record(
        conn,
        f"headgate.webhook.{verb}",
        actor=actor,
        now=now,
        object_id=webhook_id,
        tenant_id=None if tenant_id == OPERATOR_TENANT else tenant_id,
        detail={"host": urlsplit(url).hostname},
    )
