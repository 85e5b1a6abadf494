"""Tenants and their limits. Every change raises the auth epoch and is audited.

Each tenant that is not archived has its own name, as commands find it by name. The operator's own tenant is not
one of them: it is neither listed nor found here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from sqlalchemy import Row, Select, and_, bindparam, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database import auth_epoch
from accounting.database.auth_epoch import SYSTEM
from accounting.database.db import among, upsert
from accounting.database.paging import Page, newest_first, one, shaped
from accounting.tables.models import ModelLimit, Tenant
from accounting.tenants import shares
from accounting.values import texts, time_zones
from accounting.values.errors import ConflictError, InvalidError, NameTakenError
from accounting.values.ids import new_id
from accounting.values.tenant_types import ModelLimits, TenantInfo
from accounting.values.types import DEFAULT_MODEL_LIMITS, OPERATOR_TENANT, CacheShare, Limits

ID_PREFIX = "proj_"
MODEL_LIMITS = select(ModelLimit.__table__).where(ModelLimit.tenant_id == bindparam("tenant_id"))


async def create(conn: AsyncConnection, name: str, *, now: int, actor: str = SYSTEM) -> TenantInfo:
    """Creates a tenant. Raises InvalidError, and NameTakenError for the name of a tenant that is not archived."""
    tenant_id, name = new_id("proj"), _tenant_name(name)
    version = await auth_epoch.record(
        conn, "project.created", actor=actor, now=now, tenant_id=tenant_id, object_id=tenant_id
    )
    await conn.execute(insert(Tenant).values(id=tenant_id, name=name, created_at=now, version=version))
    await _check_only_one(conn, name)
    return await get(conn, tenant_id)


async def get(conn: AsyncConnection, tenant_id: str) -> TenantInfo:
    return _tenant(await one(conn, _tenants().where(Tenant.id == tenant_id), "There is no such project."))


async def list_tenants(
    conn: AsyncConnection,
    *,
    after: str | None = None,
    limit: int = 20,
    include_archived: bool = False,
    ids: Collection[str] | None = None,
) -> Page[TenantInfo]:
    """Returns one page of the tenants, or of those with these ids. Raises InvalidError."""
    query = _tenants() if include_archived else _tenants().where(Tenant.status != "archived")
    if ids is not None:
        query = query.where(among(conn, Tenant.id, ids))
    ever = select(Tenant.__table__).where(Tenant.id != OPERATOR_TENANT)
    page = await newest_first(conn, query, Tenant, after, limit, ever=ever)
    return page.of(_tenant)


async def rename(conn: AsyncConnection, tenant_id: str, name: str, *, now: int, actor: str = SYSTEM) -> TenantInfo:
    """Renames a tenant. Raises InvalidError, NotFoundError, ConflictError, and NameTakenError as `create` does."""
    await living(conn, tenant_id)
    tenant = await apply_change(conn, tenant_id, {"name": _tenant_name(name)}, "project.updated", now, actor)
    await _check_only_one(conn, tenant.name)
    return tenant


async def set_limits(
    conn: AsyncConnection, tenant_id: str, limits: Limits, *, now: int, actor: str = SYSTEM
) -> TenantInfo:
    """Sets the tenant's limits over all its models and keys."""
    await living(conn, tenant_id)
    return await apply_change(conn, tenant_id, limit_columns(limits), "rate_limit.updated", now, actor)


async def set_shares(
    conn: AsyncConnection,
    tenant_id: str,
    weight: float,
    cache: CacheShare,
    *,
    floor_limit: int | None,
    now: int,
    actor: str = SYSTEM,
) -> TenantInfo:
    """Sets the tenant's share of a busy worker: time by weight, blocks by floor and quota. `floor_limit` is the number
    of blocks that the floors of all tenants may add up to on the smallest worker. It is None if that is not known; then
    no floor may rise."""
    before = await living(conn, tenant_id)
    values = shares.columns(weight, cache)
    if cache.floor_blocks > before.cache.floor_blocks:
        others = and_(Tenant.status != "archived", Tenant.id != tenant_id)
        of_others = await conn.scalar(select(func.sum(Tenant.cache_floor_blocks)).where(others))
        if floor_limit is None:
            raise ConflictError("No worker is linked, so it is not known what floors it can keep.")
        if (left := floor_limit - int(of_others or 0)) < cache.floor_blocks:
            raise InvalidError(
                f"The floors of all tenants may sum to {floor_limit} blocks on the smallest worker: {max(0, left)} are left.",
                "cache_floor_blocks",
            )
    return await apply_change(conn, tenant_id, values, "project.updated", now, actor)


async def set_time_zone(
    conn: AsyncConnection, tenant_id: str, time_zone: str, *, now: int, actor: str = SYSTEM
) -> TenantInfo:
    """Sets the time zone. Raises InvalidError for a name that is no time zone."""
    await living(conn, tenant_id)
    values = {"time_zone": time_zones.checked(time_zone)}
    return await apply_change(conn, tenant_id, values, "project.updated", now, actor)


async def set_stores_responses(
    conn: AsyncConnection, tenant_id: str, stores: bool, *, now: int, actor: str = SYSTEM
) -> TenantInfo:
    """Sets whether responses of the tenant may be stored. Those that are stay until they expire or are deleted."""
    await living(conn, tenant_id)
    return await apply_change(conn, tenant_id, {"stores_responses": stores}, "project.updated", now, actor)


async def set_buys_overflow(
    conn: AsyncConnection, tenant_id: str, buys: bool, *, now: int, actor: str = SYSTEM
) -> TenantInfo:
    """Sets whether bought capacity may answer for the tenant, at its own price."""
    await living(conn, tenant_id)
    return await apply_change(conn, tenant_id, {"buys_overflow": buys}, "project.updated", now, actor)


async def time_zones_of(conn: AsyncConnection, tenant_ids: Collection[str]) -> dict[str, str]:
    query = select(Tenant.id, Tenant.time_zone).where(Tenant.id.in_(sorted(set(tenant_ids))))
    return {row.id: row.time_zone for row in await conn.execute(query)}


async def weights_of(conn: AsyncConnection, tenant_ids: Collection[str]) -> dict[str, float]:
    """Returns the weights by which busy workers divide their time among these tenants."""
    query = select(Tenant.id, Tenant.weight_percent).where(Tenant.id.in_(sorted(set(tenant_ids))))
    return {row.id: row.weight_percent / 100 for row in await conn.execute(query)}


async def living(conn: AsyncConnection, tenant_id: str) -> TenantInfo:
    """Returns the tenant, which stays as it is until the end of the transaction. Raises ConflictError if it is
    archived: then nothing in it may be created or changed."""
    await auth_epoch.hold(conn)
    tenant = await get(conn, tenant_id)
    if tenant.status == "archived":
        raise ConflictError("The project is archived.")
    return tenant


async def apply_change(
    conn: AsyncConnection, tenant_id: str, values: dict[str, Any], event: str, now: int, actor: str
) -> TenantInfo:
    """Writes the columns `values` of the tenant, raises the auth epoch and records `event`. The caller has checked that
    the tenant may be changed."""
    version = await auth_epoch.record(
        conn, event, actor=actor, now=now, tenant_id=tenant_id, object_id=tenant_id, detail=values
    )
    await conn.execute(update(Tenant).where(Tenant.id == tenant_id).values(**values, version=version))
    return await get(conn, tenant_id)


# Limits by model


async def model_limits(conn: AsyncConnection, tenant_id: str) -> dict[str, ModelLimits]:
    """Returns the limits that were set, by model. A model that is missing has the defaults."""
    return limits_of(await conn.execute(MODEL_LIMITS, {"tenant_id": tenant_id}))


def limits_of(rows: Iterable[Row[Any]]) -> dict[str, ModelLimits]:
    """Returns the limits of these rows, as `MODEL_LIMITS` selects them, by model."""
    return {row.model: ModelLimits(row.model, shaped(Limits, row), row.batch_backlog_tokens) for row in rows}


async def set_model_limits(
    conn: AsyncConnection, tenant_id: str, limits: ModelLimits, *, now: int, actor: str = SYSTEM
) -> None:
    await living(conn, tenant_id)
    values = {**limit_columns(limits.limits), "batch_backlog_tokens": limits.batch_backlog_tokens}
    statement = upsert(conn, ModelLimit.__table__)
    await conn.execute(
        statement.values(tenant_id=tenant_id, model=limits.model, **values).on_conflict_do_update(
            index_elements=["tenant_id", "model"], set_=values
        )
    )
    await apply_change(conn, tenant_id, {}, "rate_limit.updated", now, actor)


def default_limits(model: str) -> ModelLimits:
    return ModelLimits(model, DEFAULT_MODEL_LIMITS, None)


def limit_columns(limits: Limits) -> dict[str, int | None]:
    """Returns the limits by column name. Raises InvalidError for a negative one."""
    columns: dict[str, int | None] = {name: getattr(limits, name) for name in limits.__struct_fields__}
    for name, value in columns.items():
        if value is not None and value < 0:
            raise InvalidError("A limit must not be negative.", name)
    return columns


def _tenants() -> Select[Any]:
    """Selects the tenants. Erased ones exist only for the books."""
    return select(Tenant.__table__).where(Tenant.id != OPERATOR_TENANT, Tenant.erased_at.is_(None))


def _tenant(row: Row[Any]) -> TenantInfo:
    return shaped(
        TenantInfo, row, limits=shaped(Limits, row), weight=row.weight_percent / 100, cache=shares.cache_share(row)
    )


def _tenant_name(name: str) -> str:
    name = texts.checked_name(name)
    if name.startswith(ID_PREFIX):
        raise InvalidError(f"A project's name must not begin with '{ID_PREFIX}', as ids do.", "name")
    return name


async def _check_only_one(conn: AsyncConnection, name: str) -> None:
    """Raises NameTakenError if two tenants that are not archived have the name. It is called after the change is
    written: a transaction that raised the auth epoch holds its row until the commit, so of two that take a name at once
    the later one sees the first. A unique index would give no more, and could not be created where older versions let a
    name be given twice."""
    others = Tenant.id != OPERATOR_TENANT, Tenant.status != "archived"
    same = select(func.count()).where(Tenant.name == name, *others)
    if int(await conn.scalar(same) or 0) > 1:
        raise NameTakenError("The name is taken: choose another one, or archive its holder first.")
