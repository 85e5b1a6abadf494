"""The erasure of a tenant: its data key is destroyed, so that nobody can read its stored texts any more; the books stay
complete.

Ids, counts and times remain, under a tenant without a name. Only an archived tenant can be erased, and only after the
retention time that the operator set.
"""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
from sqlalchemy import ColumnElement, delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import InstrumentedAttribute

from accounting.billing import invoice_lines
from accounting.database import auth_epoch
from accounting.database.db import Database, among
from accounting.events import webhooks
from accounting.responses import stored
from accounting.tables.admin_models import ModelPermission, SpendAlert
from accounting.tables.batch_models import Batch, BatchLine, DataKey, File, IdempotentReply
from accounting.tables.models import ApiKey, ServiceAccount, Tenant
from accounting.tables.request_models import LabelUsage, RequestLog
from accounting.tenants import tenants
from accounting.terms import profiles
from accounting.values.errors import ConflictError
from accounting.values.types import ENDED_BATCH

DAY_S = 86_400
ERASED = "(deleted)"
PIECE_ROWS = 1_000
"""The most rows of the request log that one transaction deletes. Writers of SQLite wait for each other."""


class ErasureReport(msgspec.Struct, frozen=True):
    """The proof of an erasure: counts of the objects that could be read before and cannot be read any more."""

    tenant_id: str
    erased_at: int
    num_keys: int
    num_files: int
    num_answers: int
    data_key_destroyed: bool


async def erase(conn: AsyncConnection, tenant_id: str, *, retention_days: int, now: int, actor: str) -> ErasureReport:
    """Erases a tenant for good. Raises ConflictError while this is not allowed. Nobody makes it a data key
    meanwhile."""
    await conn.execute(select(Tenant.id).where(Tenant.id == tenant_id).with_for_update())
    await _refuse(conn, tenant_id, retention_days, now)
    report = await _destroy(conn, tenant_id, now)
    detail = {name: value for name, value in msgspec.to_builtins(report).items() if name != "tenant_id"}
    version = await auth_epoch.record(
        conn, "project.deleted", actor=actor, now=now, tenant_id=tenant_id, object_id=tenant_id, detail=detail
    )
    values = {"erased_at": now, "name": ERASED, "version": version}
    await conn.execute(update(Tenant).where(Tenant.id == tenant_id).values(**values))
    return report


async def delete_request_log(database: Database, tenant_id: str, *, retention_days: int, now: int) -> None:
    """Deletes the tenant's rows of the request log in short transactions, before `erase`, which has the same terms."""
    async with database.read() as conn:
        await _refuse(conn, tenant_id, retention_days, now)
    mine = select(RequestLog.request_id).where(RequestLog.tenant_id == tenant_id).limit(PIECE_ROWS)
    while True:
        async with database.write() as conn:
            ids = list(await conn.scalars(mine))
            await conn.execute(delete(RequestLog).where(among(conn, RequestLog.request_id, ids)))
        if len(ids) < PIECE_ROWS:
            return


async def _refuse(conn: AsyncConnection, tenant_id: str, retention_days: int, now: int) -> None:
    """Raises ConflictError unless the tenant may be erased."""
    tenant = await tenants.get(conn, tenant_id)
    if tenant.status != "archived" or tenant.archived_at is None:
        raise ConflictError("Only an archived project can be deleted.")
    due = tenant.archived_at + retention_days * DAY_S
    if now < due:
        day = datetime.fromtimestamp(due, UTC).strftime("%Y-%m-%d %H:%M UTC")
        raise ConflictError(f"An archived project is kept for {retention_days} days: this one until {day}.")
    running = (Batch.tenant_id == tenant_id) & Batch.state.not_in(ENDED_BATCH)
    if await _count(conn, Batch.id, running):
        raise ConflictError("A batch of the project has not ended yet.")
    if await profiles.is_customer_set(conn, tenant_id) and await invoice_lines.left(conn, tenant_id, now):
        raise ConflictError(
            "The project has charges that no invoice has, and without its billing profile they would be billed under "
            "another tax: close its months first."
        )


async def _destroy(conn: AsyncConnection, tenant_id: str, now: int) -> ErasureReport:
    mine = select(Batch.id).where(Batch.tenant_id == tenant_id)
    keys = await conn.execute(
        update(ApiKey).where(ApiKey.tenant_id == tenant_id, ApiKey.revoked_at.is_(None)).values(revoked_at=now)
    )
    await conn.execute(update(ApiKey).where(ApiKey.tenant_id == tenant_id).values(name=None, addresses=None))
    accounts = update(ServiceAccount).where(ServiceAccount.tenant_id == tenant_id)
    await conn.execute(accounts.values(name=ERASED, deleted_at=now))
    answers = await conn.execute(delete(IdempotentReply).where(IdempotentReply.tenant_id == tenant_id))
    num_responses = await stored.erase(conn, tenant_id)
    lines = update(BatchLine).where(BatchLine.batch_id.in_(mine))
    await conn.execute(lines.values(body=None, custom_id=None, error=None))
    await conn.execute(update(Batch).where(Batch.tenant_id == tenant_id).values(metadata_=None, errors=None))
    num_files = await _count(conn, File.id, (File.tenant_id == tenant_id) & File.storage_key.is_not(None))
    await conn.execute(
        update(File)
        .where(File.tenant_id == tenant_id)
        .values(name=ERASED, deleted_at=func.coalesce(File.deleted_at, now))
    )
    await conn.execute(
        update(SpendAlert)
        .where(SpendAlert.tenant_id == tenant_id)
        .values(recipients=[], subject_prefix=None, deleted_at=now)
    )
    await webhooks.remove_of_tenant(conn, tenant_id)
    await profiles.forget(conn, tenant_id)
    await conn.execute(delete(ModelPermission).where(ModelPermission.tenant_id == tenant_id))
    await conn.execute(delete(RequestLog).where(RequestLog.tenant_id == tenant_id))
    await conn.execute(delete(LabelUsage).where(LabelUsage.tenant_id == tenant_id))
    key = await conn.execute(delete(DataKey).where(DataKey.tenant_id == tenant_id))
    return ErasureReport(tenant_id, now, keys.rowcount, num_files, answers.rowcount + num_responses, bool(key.rowcount))


async def _count(conn: AsyncConnection, column: InstrumentedAttribute[str], where: ColumnElement[bool]) -> int:
    return int(await conn.scalar(select(func.count(column)).where(where)) or 0)
