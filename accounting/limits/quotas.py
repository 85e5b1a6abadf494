"""Limits besides those that are columns of tenant, key and model. Every change raises the auth epoch and is audited."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from sqlalchemy import Row, bindparam, delete, select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database import auth_epoch
from accounting.database.auth_epoch import SYSTEM
from accounting.database.db import among_given, upsert
from accounting.tables.budget_models import QuotaRow
from accounting.tables.models import ApiKey
from accounting.tenants import tenants
from accounting.values.budget_types import MAX_AMOUNT, Quota
from accounting.values.errors import InvalidError, NotFoundError

_IN_ORDER = select(QuotaRow.__table__).order_by(QuotaRow.level, QuotaRow.subject, QuotaRow.dimension)
OF_TENANT = _IN_ORDER.where(QuotaRow.tenant_id == bindparam("tenant_id"))


async def of_tenant(conn: AsyncConnection, tenant_id: str) -> tuple[Quota, ...]:
    return quotas_of(await conn.execute(OF_TENANT, {"tenant_id": tenant_id}))


def quotas_of(rows: Iterable[Row[Any]]) -> tuple[Quota, ...]:
    """Returns the quotas of these rows, as `OF_TENANT` selects them."""
    return tuple(map(_quota, rows))


@cache
def of_given_tenants(dialect: str) -> Any:
    """Returns the statement of the quotas of these tenants (`given`)."""
    return _IN_ORDER.where(among_given(dialect, QuotaRow.tenant_id))


def by_tenant(rows: Iterable[Row[Any]]) -> dict[str, tuple[Quota, ...]]:
    """Returns the quotas of the rows of `of_given_tenants`."""
    found: dict[str, tuple[Quota, ...]] = {}
    for row in rows:
        found[row.tenant_id] = (*found.get(row.tenant_id, ()), _quota(row))
    return found


def _quota(row: Row[Any]) -> Quota:
    return Quota(row.level, row.subject, row.dimension, row.limit, row.shadow)


async def put(conn: AsyncConnection, tenant_id: str, quota: Quota, *, now: int, actor: str = SYSTEM) -> None:
    """Sets a quota. It replaces one with the same level, subject and dimension. Raises InvalidError."""
    await tenants.living(conn, tenant_id)
    await _check(conn, tenant_id, quota)
    values = {"limit": quota.limit, "shadow": quota.shadow}
    await auth_epoch.record(
        conn,
        "rate_limit.updated",
        actor=actor,
        now=now,
        tenant_id=tenant_id,
        object_id=tenant_id,
        detail={"level": quota.level, "subject": quota.subject, "dimension": quota.dimension, **values},
    )
    statement = upsert(conn, QuotaRow.__table__).values(
        tenant_id=tenant_id, level=quota.level, subject=quota.subject, dimension=quota.dimension, **values
    )
    keys = ["tenant_id", "level", "subject", "dimension"]
    await conn.execute(statement.on_conflict_do_update(index_elements=keys, set_=values))


async def remove(
    conn: AsyncConnection, tenant_id: str, level: str, subject: str, dimension: str, *, now: int, actor: str = SYSTEM
) -> None:
    gone = delete(QuotaRow).where(
        QuotaRow.tenant_id == tenant_id,
        QuotaRow.level == level,
        QuotaRow.subject == subject,
        QuotaRow.dimension == dimension,
    )
    if (await conn.execute(gone)).rowcount != 1:
        raise NotFoundError("There is no such quota.")
    await auth_epoch.record(
        conn,
        "rate_limit.updated",
        actor=actor,
        now=now,
        tenant_id=tenant_id,
        object_id=tenant_id,
        detail={"level": level, "subject": subject, "dimension": dimension, "limit": None},
    )


async def _check(conn: AsyncConnection, tenant_id: str, quota: Quota) -> None:
    if not 0 <= quota.limit <= MAX_AMOUNT:
        raise InvalidError(f"A limit must be 0 to {MAX_AMOUNT}.", "limit")
    if (quota.level in ("key", "model")) != bool(quota.subject):
        raise InvalidError("A key's or a model's limit names it; others name nothing.", "subject")
    if quota.level == "key":
        mine = select(ApiKey.id).where(ApiKey.id == quota.subject, ApiKey.tenant_id == tenant_id)
        if await conn.scalar(mine) is None:
            raise InvalidError("The project has no such api key.", "subject")
