"""The models that a tenant's keys may use, in addition to each key's own list. Without a row no model is denied."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import Row, bindparam, delete, select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database import auth_epoch
from accounting.database.db import upsert
from accounting.tables.admin_models import ModelPermission
from accounting.values.tenant_types import ModelPermissions

OF_TENANT = select(ModelPermission.__table__).where(ModelPermission.tenant_id == bindparam("tenant_id"))


async def get(conn: AsyncConnection, tenant_id: str) -> ModelPermissions:
    return permissions_of(await conn.execute(OF_TENANT, {"tenant_id": tenant_id}))


def permissions_of(rows: Iterable[Row[Any]]) -> ModelPermissions:
    """Returns the permissions of the one row that `OF_TENANT` selects, or those of a tenant without a row."""
    for row in rows:
        return ModelPermissions(row.mode, tuple(row.model_ids))
    return ModelPermissions()


async def put(
    conn: AsyncConnection, tenant_id: str, wanted: ModelPermissions, *, now: int, actor: str
) -> ModelPermissions:
    values: dict[str, Any] = {"mode": wanted.mode, "model_ids": sorted(set(wanted.model_ids))}
    statement = upsert(conn, ModelPermission.__table__).values(tenant_id=tenant_id, **values)
    await conn.execute(statement.on_conflict_do_update(index_elements=["tenant_id"], set_=values))
    await _record(conn, "headgate.model_permissions.updated", tenant_id, now, actor, values)
    return await get(conn, tenant_id)


async def clear(conn: AsyncConnection, tenant_id: str, *, now: int, actor: str) -> None:
    await conn.execute(delete(ModelPermission).where(ModelPermission.tenant_id == tenant_id))
    await _record(conn, "headgate.model_permissions.deleted", tenant_id, now, actor, {})


async def _record(
    conn: AsyncConnection, event: str, tenant_id: str, now: int, actor: str, detail: dict[str, Any]
) -> None:
    await auth_epoch.record(conn, event, actor=actor, now=now, tenant_id=tenant_id, object_id=tenant_id, detail=detail)
