"""Suspending and archiving a tenant, and the consequences for its batches and its running answers."""

from __future__ import annotations

from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.access import api_keys
from accounting.batches import batches
from accounting.database import auth_epoch
from accounting.database.auth_epoch import SYSTEM
from accounting.tenants import tenants
from accounting.values.tenant_types import TenantInfo


async def archive(
    conn: AsyncConnection, tenant_id: str, *, now: int, end_streams: bool = False, actor: str = SYSTEM
) -> TenantInfo:
    """Archives a tenant for good: its keys get 403 from now on, its open batches are cancelled, the books remain. A
    repeated call changes nothing."""
    tenant = await tenants.get(conn, tenant_id)
    if tenant.status == "archived":
        return tenant
    await batches.stop_all(conn, tenant_id, now)
    values = {"status": "archived", "archived_at": now}
    tenant = await tenants.apply_change(conn, tenant_id, values, "project.archived", now, actor)
    if end_streams:
        await _end_streams(conn, tenant_id)
    return tenant


async def suspend(
    conn: AsyncConnection, tenant_id: str, suspended: bool, *, now: int, end_streams: bool = False, actor: str = SYSTEM
) -> TenantInfo:
    """Suspends a tenant or makes it active again. With `end_streams`, its running requests end too, on every
    gateway."""
    await tenants.living(conn, tenant_id)
    values = {"status": "suspended" if suspended else "active"}
    tenant = await tenants.apply_change(conn, tenant_id, values, "project.updated", now, actor)
    if suspended and end_streams:
        await _end_streams(conn, tenant_id)
    return tenant


async def _end_streams(conn: AsyncConnection, tenant_id: str) -> None:
    """Ends the tenant's streams. The caller has written its change, whose version is the newest one."""
    await api_keys.end_streams_of_tenant(conn, tenant_id, await auth_epoch.auth_epoch(conn))
