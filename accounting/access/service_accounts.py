"""Service accounts: the holders of a tenant's keys. Every change raises the auth epoch and is audited."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Row, Select, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database import auth_epoch
from accounting.database.auth_epoch import SYSTEM
from accounting.database.paging import Page, newest_first, one
from accounting.events import events, outbox
from accounting.tables.models import ApiKey, ServiceAccount
from accounting.tenants import tenants
from accounting.values import texts
from accounting.values.ids import new_id
from accounting.values.tenant_types import ServiceAccountInfo


async def create_service_account(
    conn: AsyncConnection, tenant_id: str, name: str, *, now: int, with_key: bool = True, actor: str = SYSTEM
) -> ServiceAccountInfo:
    """Creates a service account. `with_key` False gives it the role `none`, for an account that will never hold a
    key."""
    await tenants.living(conn, tenant_id)
    account_id = new_id("svc_acct")
    await auth_epoch.record(
        conn, "service_account.created", actor=actor, now=now, tenant_id=tenant_id, object_id=account_id
    )
    await conn.execute(
        insert(ServiceAccount).values(
            id=account_id,
            tenant_id=tenant_id,
            name=texts.checked_name(name),
            role="member" if with_key else "none",
            created_at=now,
        )
    )
    return await get_service_account(conn, tenant_id, account_id)


async def get_service_account(conn: AsyncConnection, tenant_id: str, account_id: str) -> ServiceAccountInfo:
    query = _accounts(tenant_id).where(ServiceAccount.id == account_id)
    return _account(await one(conn, query, "There is no such service account."))


async def list_service_accounts(
    conn: AsyncConnection, tenant_id: str, *, after: str | None = None, limit: int = 20
) -> Page[ServiceAccountInfo]:
    ever = select(ServiceAccount.__table__).where(ServiceAccount.tenant_id == tenant_id)
    page = await newest_first(conn, _accounts(tenant_id), ServiceAccount, after, limit, ever=ever)
    return page.of(_account)


async def rename_service_account(
    conn: AsyncConnection, tenant_id: str, account_id: str, name: str, *, now: int, actor: str = SYSTEM
) -> ServiceAccountInfo:
    await auth_epoch.hold(conn)
    await get_service_account(conn, tenant_id, account_id)
    await auth_epoch.record(
        conn, "service_account.updated", actor=actor, now=now, tenant_id=tenant_id, object_id=account_id
    )
    await conn.execute(
        update(ServiceAccount).where(ServiceAccount.id == account_id).values(name=texts.checked_name(name))
    )
    return await get_service_account(conn, tenant_id, account_id)


async def delete_service_account(
    conn: AsyncConnection, tenant_id: str, account_id: str, *, now: int, end_streams: bool = False, actor: str = SYSTEM
) -> None:
    """Deletes an account and revokes its keys. With `end_streams`, requests under those keys end too, on every
    gateway."""
    await auth_epoch.hold(conn)
    await get_service_account(conn, tenant_id, account_id)
    version = await auth_epoch.record(
        conn, "service_account.deleted", actor=actor, now=now, tenant_id=tenant_id, object_id=account_id
    )
    ended = {"streams_ended": version} if end_streams else {}
    revoked = await conn.execute(
        update(ApiKey)
        .where(ApiKey.service_account_id == account_id, ApiKey.revoked_at.is_(None))
        .values(revoked_at=now, version=version, **ended)
        .returning(ApiKey.id)
    )
    keys = sorted(revoked.scalars())
    told = [events.api_key("revoked", tenant_id, key_id, version, now) for key_id in keys]
    await outbox.write(conn, told)
    await conn.execute(update(ServiceAccount).where(ServiceAccount.id == account_id).values(deleted_at=now))


def _accounts(tenant_id: str) -> Select[Any]:
    mine = ServiceAccount.tenant_id == tenant_id
    return select(ServiceAccount.__table__).where(mine, ServiceAccount.deleted_at.is_(None))


def _account(row: Row[Any]) -> ServiceAccountInfo:
    return ServiceAccountInfo(row.id, row.tenant_id, row.name, row.role, row.created_at)
