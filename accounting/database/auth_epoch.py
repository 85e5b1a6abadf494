"""`record` writes every change that authentication has to notice: the epoch and the audit row together."""

from __future__ import annotations

from typing import Any

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database import audit
from accounting.tables.models import AuthEpoch

SYSTEM = "system"
"""The actor of changes that no key asked for, as at the first start."""
CLI = "cli"
"""The actor of commands that write to SQL directly."""


_EPOCH = select(AuthEpoch.epoch).where(AuthEpoch.id == 1)
_RAISED = update(AuthEpoch).where(AuthEpoch.id == 1).values(epoch=AuthEpoch.epoch + 1).returning(AuthEpoch.epoch)


async def auth_epoch(conn: AsyncConnection) -> int:
    """Returns the epoch, which rises with each change. A gateway that sees another number than its own clears its
    cache."""
    epoch = await conn.scalar(_EPOCH)
    assert epoch is not None, "the first migration writes this row"
    return epoch


async def hold(conn: AsyncConnection) -> None:
    """Waits for the changes under way, and lets others wait until the end of this transaction. What a change checks
    before it is `record`ed is read after this: PostgreSQL shows each statement what was committed before it. SQLite has
    one writer."""
    await conn.execute(_EPOCH.with_for_update())


async def record(
    conn: AsyncConnection,
    event: str,
    *,
    actor: str,
    now: int,
    tenant_id: str | None = None,
    object_id: str | None = None,
    detail: dict[str, Any] | None = None,
) -> int:
    """Writes the audit row and raises the epoch. Returns the new epoch, which is the version of the changed row."""
    await audit.record(conn, event, actor=actor, now=now, tenant_id=tenant_id, object_id=object_id, detail=detail)
    return await raised(conn)


async def raised(conn: AsyncConnection) -> int:
    """Raises the epoch and returns it. For a change whose audit row its caller writes, if it has one."""
    epoch: int | None = await conn.scalar(_RAISED)
    assert epoch is not None
    return epoch
