"""Stored responses: insert, read, delete, and what a tenant may have of them.

The texts are encrypted by the caller. A tenant has at most `MAX_RESPONSES` and `MAX_BYTES`; beyond them its oldest ones
leave, since responses are stored unless a client says otherwise, and a full store must not refuse its requests.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

import msgspec
from sqlalchemy import ColumnElement, Row, delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import aliased

from accounting.database.db import upsert
from accounting.database.paging import shaped
from accounting.tables.response_models import Response, ResponseEvents, ResponseTotal

State = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
RUNNING: tuple[State, ...] = ("queued", "in_progress")
KEEP_S = 30 * 86_400
MAX_RESPONSES, MAX_BYTES = 1_000_000, 4 * 1024**3
MAX_CHAIN = 1_000
"""The most responses of one chain. A caller makes no longer one."""
PURGED_AT_ONCE = 500


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    tenant_id: str
    key_id: str
    state: State
    request: bytes
    body: bytes | None
    created_at: int
    is_background: bool = False
    previous_id: str | None = None
    num_before: int = 0
    chain_bytes: int = 0
    next_number: int = 0
    is_stopping: bool = False

    @property
    def has_ended(self) -> bool:
        return self.state not in RUNNING


async def insert(conn: AsyncConnection, response: StoredResponse) -> None:
    """Stores a response, and removes the tenant's oldest ones if there are too many now."""
    num_bytes = len(response.request) + len(response.body or b"")
    row = msgspec.structs.asdict(response) | {"num_bytes": num_bytes, "expires_at": response.created_at + KEEP_S}
    num, total = await _count(conn, response.tenant_id, 1, num_bytes)
    await conn.execute(Response.__table__.insert().values(**row))  # type: ignore[attr-defined]
    while num > MAX_RESPONSES or total > MAX_BYTES:
        removed = await _remove_oldest(conn, response.tenant_id, num - MAX_RESPONSES)
        if removed is None:
            return
        num, total = removed


async def _remove_oldest(conn: AsyncConnection, tenant_id: str, at_least: int) -> tuple[int, int] | None:
    """Removes some of the oldest that have ended. Returns what is left as (responses, bytes), or None if none was
    removed. The newest response stays, however large it is."""
    ended = (Response.tenant_id == tenant_id) & Response.state.not_in(RUNNING)
    newest = select(func.max(Response.id)).where(Response.tenant_id == tenant_id).scalar_subquery()
    oldest = select(Response.id).where(ended, Response.id != newest).order_by(Response.created_at, Response.id)
    ids = (await conn.execute(oldest.limit(min(max(1, at_least), PURGED_AT_ONCE)))).scalars().all()
    if not ids:
        return None
    return (await _remove(conn, Response.id.in_(ids))).get(tenant_id)


async def find(conn: AsyncConnection, tenant_id: str, response_id: str, now: int) -> StoredResponse | None:
    """Returns a response of the tenant's that has not expired."""
    found = (await conn.execute(select(Response.__table__).where(_mine(tenant_id, response_id, now)))).first()
    return None if found is None else of_row(found)


async def chain(conn: AsyncConnection, tenant_id: str, response_id: str, now: int) -> list[StoredResponse]:
    """Returns the response and all before it, the oldest first. If one of them is gone, those before it are missing,
    and the first one has a `previous_id`."""
    table = Response.__table__
    mine = (table.c.tenant_id == tenant_id) & (table.c.expires_at > now)
    links = select(table.c.id, table.c.previous_id).where(mine, table.c.id == response_id).cte("links", recursive=True)
    before = select(table.c.id, table.c.previous_id).join(links, table.c.id == links.c.previous_id).where(mine)
    links = links.union(before)
    found = await conn.execute(select(table).where(table.c.id.in_(select(links.c.id))).order_by(table.c.num_before))
    return [of_row(row) for row in found]


async def chain_bytes(conn: AsyncConnection, tenant_id: str, response_id: str, now: int) -> int:
    """Returns the bytes of the items of the response and of all before it; 0 if it does not exist."""
    return await conn.scalar(select(Response.chain_bytes).where(_mine(tenant_id, response_id, now))) or 0


async def several(
    conn: AsyncConnection, tenant_id: str, response_ids: Collection[str], now: int
) -> list[StoredResponse]:
    """Returns those of the responses that are the tenant's and have not expired."""
    mine = (Response.tenant_id == tenant_id) & (Response.expires_at > now)
    found = await conn.execute(select(Response.__table__).where(mine, Response.id.in_(sorted(response_ids))))
    return [of_row(row) for row in found]


async def own_bytes(conn: AsyncConnection, tenant_id: str, response_ids: Collection[str], now: int) -> int:
    """Returns the bytes of these responses' own items, without those of the responses before them. Where the one before
    is gone, its bytes count too."""
    mine = (Response.tenant_id == tenant_id) & (Response.expires_at > now)
    before = aliased(Response)
    own = Response.chain_bytes - func.coalesce(before.chain_bytes, 0)
    query = select(func.coalesce(func.sum(own), 0)).outerjoin(before, before.id == Response.previous_id)
    return int(await conn.scalar(query.where(mine, Response.id.in_(sorted(response_ids)))) or 0)


async def remove(conn: AsyncConnection, tenant_id: str, response_id: str, now: int) -> bool:
    """Deletes a response. Returns False if there is none."""
    return bool(await _remove(conn, _mine(tenant_id, response_id, now)))


async def purge(conn: AsyncConnection, now: int) -> bool:
    """Deletes responses that have expired, `PURGED_AT_ONCE` at most. Returns whether more may be there."""
    expired = select(Response.id).where(Response.expires_at <= now).limit(PURGED_AT_ONCE)
    if ids := (await conn.execute(expired)).scalars().all():
        await _remove(conn, Response.id.in_(ids))
    return len(ids) == PURGED_AT_ONCE


async def _remove(conn: AsyncConnection, where: ColumnElement[bool]) -> dict[str, tuple[int, int]]:
    """Deletes responses. Returns what is left of each tenant that had one, as (responses, bytes)."""
    gone: dict[str, list[int]] = {}
    for row in await conn.execute(delete(Response).where(where).returning(Response.tenant_id, Response.num_bytes)):
        gone.setdefault(row.tenant_id, []).append(row.num_bytes)
    return {
        tenant_id: await _count(conn, tenant_id, -len(each), -sum(each)) for tenant_id, each in sorted(gone.items())
    }


async def grow(conn: AsyncConnection, tenant_id: str, response_id: str, num_bytes: int) -> None:
    """Counts further bytes of a stored response."""
    await conn.execute(
        update(Response).where(Response.id == response_id).values(num_bytes=Response.num_bytes + num_bytes)
    )
    await _count(conn, tenant_id, 0, num_bytes)


async def _count(conn: AsyncConnection, tenant_id: str, num: int, num_bytes: int) -> tuple[int, int]:
    """Changes the tenant's totals. Returns them."""
    statement = upsert(conn, ResponseTotal.__table__).values(
        tenant_id=tenant_id, num_responses=max(0, num), num_bytes=max(0, num_bytes)
    )
    changed = statement.on_conflict_do_update(
        index_elements=["tenant_id"],
        set_={"num_responses": ResponseTotal.num_responses + num, "num_bytes": ResponseTotal.num_bytes + num_bytes},
    ).returning(ResponseTotal.num_responses, ResponseTotal.num_bytes)
    row = (await conn.execute(changed)).one()
    return int(row.num_responses), int(row.num_bytes)


async def erase(conn: AsyncConnection, tenant_id: str) -> int:
    """Deletes all responses of a tenant. Returns their number."""
    await conn.execute(
        delete(ResponseEvents).where(
            ResponseEvents.response_id.in_(select(Response.id).where(Response.tenant_id == tenant_id))
        )
    )
    done = await conn.execute(delete(Response).where(Response.tenant_id == tenant_id))
    await conn.execute(delete(ResponseTotal).where(ResponseTotal.tenant_id == tenant_id))
    return done.rowcount


def _mine(tenant_id: str, response_id: str, now: int) -> ColumnElement[bool]:
    return (Response.id == response_id) & (Response.tenant_id == tenant_id) & (Response.expires_at > now)


def of_row(row: Row[Any]) -> StoredResponse:
    return shaped(StoredResponse, row)
