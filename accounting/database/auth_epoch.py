"""Every change that authentication has to notice goes through `record`: epoch and audit row together."""

from __future__ import annotations

from typing import Any

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database import audit
from accounting.tables.models import AuthEpoch

SYSTEM = "system"
"""The actor of what no key asked for: the first start."""
CLI = "cli"
"""The actor of commands that write to SQL themselves."""


async def auth_epoch(conn: AsyncConnection) -> int:
    """Rises with each change; a gateway that sees another number than its own forgets what it cached."""
    epoch = await conn.scalar(select(AuthEpoch.epoch).where(AuthEpoch.id == 1))
    assert epoch is not None, "the first migration writes this row"
    return epoch


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
    """Returns the new epoch: the version of the row that changed."""
    await audit.record(conn, event, actor=actor, now=now, tenant_id=tenant_id, object_id=object_id, detail=detail)
    raised = update(AuthEpoch).where(AuthEpoch.id == 1).values(epoch=AuthEpoch.epoch + 1)
    epoch: int | None = await conn.scalar(raised.returning(AuthEpoch.epoch))
    assert epoch is not None
    return epoch
