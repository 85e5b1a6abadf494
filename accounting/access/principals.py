"""Authentication: a credential becomes a Principal. The module knows keys, tenants and batches; the gateway decides
what a principal may do."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from sqlalchemy import Row, bindparam, select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.access import api_keys, credentials, delegation
from accounting.database.driver_selects import select_together
from accounting.database.paging import shaped
from accounting.limits import budgets, quotas
from accounting.tables.batch_models import Batch
from accounting.tables.models import ApiKey, Tenant
from accounting.tables.response_models import Response
from accounting.tenants import model_permissions, shares, tenants
from accounting.values.tenant_types import ApiKeyInfo
from accounting.values.types import Limits, Principal

RUNNING_BATCH = ("in_progress", "finalizing")
"""States in which a batch's credential is valid. While it is finalizing, stored answers are still fetched through the
gateway."""

WAITING_RESPONSE = ("queued", "in_progress")
"""States in which the credential of a response in the background is valid."""

RUN_SCOPE = "run"
"""The only scope of that credential. No key has it."""

_TENANT = select(Tenant.__table__).where(Tenant.id == bindparam("tenant_id"))


async def resolve(conn: AsyncConnection, pepper: bytes, key_value: str, now: int) -> Principal | None:
    """Returns None for a credential that is unknown, revoked, expired, or no key at all. A wrong checksum costs no
    statement."""
    if key_value.startswith("hg_batch_"):
        return await _resolve_batch(conn, pepper, key_value, now)
    if (response_id := credentials.parse_run(pepper, key_value)) is not None:
        return await _resolve_run(conn, response_id)
    parsed = credentials.parse(key_value)
    if parsed is None:
        return None
    if not await api_keys.is_genuine(conn, pepper, parsed.public_id, key_value, now):
        return None
    key = await api_keys.lookup(conn, parsed.public_id)
    if key is None or not _living(key, now):
        return None
    return await _principal(conn, key, until=_end_of(pepper, key_value, key))


async def _resolve_batch(conn: AsyncConnection, pepper: bytes, key_value: str, now: int) -> Principal | None:
    """Returns the principal of the submitting key as it is now. Revoking that key thus stops the batch."""
    batch_id = credentials.parse_batch(pepper, key_value)
    if batch_id is None:
        return None
    query = select(ApiKey.__table__).join(Batch, Batch.key_id == ApiKey.id)
    running = Batch.state.in_(RUNNING_BATCH)
    key = (await conn.execute(query.where(Batch.id == batch_id, running))).first()
    if key is None or not _living(key, now):
        return None
    return await _principal(conn, key, batch_id, key.expires_at)


async def _resolve_run(conn: AsyncConnection, response_id: str) -> Principal | None:
    """Returns who may ask for the run of a response that waits, and for nothing else. It may do so whatever has become
    of the response's key and tenant: a run that they do not allow ends as failed, and one that nobody asks for never
    ends."""
    query = select(Response.tenant_id, Response.key_id)
    row = (await conn.execute(query.where(Response.id == response_id, Response.state.in_(WAITING_RESPONSE)))).first()
    if row is None:
        return None
    whole = await of_tenant(conn, row.tenant_id)
    return msgspec.structs.replace(whole, key_id=row.key_id, scopes=frozenset({RUN_SCOPE}), tenant_status="active")


async def of_run(conn: AsyncConnection, response_id: str, now: int) -> Principal | None:
    """Returns the principal of the key that asked for a response in the background, as that key is now. It is None once
    the response has ended."""
    query = select(ApiKey.__table__).join(Response, Response.key_id == ApiKey.id)
    key = (await conn.execute(query.where(Response.id == response_id, Response.state.in_(WAITING_RESPONSE)))).first()
    if key is None or not _living(key, now):
        return None
    whole = await _principal(conn, key, until=key.expires_at)
    return msgspec.structs.replace(whole, addresses=None, scopes=whole.scopes & {"chat"})


def _living(key: Row[Any], now: int) -> bool:
    alive = key.revoked_at is None and not key.disabled
    return alive and (key.expires_at is None or key.expires_at > now)


def _end_of(pepper: bytes, key_value: str, key: Row[Any]) -> int | None:
    """Returns the time at which this secret ends. A secret that was replaced ends with the overlap."""
    ends = [key.expires_at]
    if not credentials.verify(pepper, key_value, key.hash):
        ends.append(key.previous_until)
    return min((at for at in ends if at is not None), default=None)


async def of_tenant(conn: AsyncConnection, tenant_id: str, models: frozenset[str] | None = None) -> Principal:
    """Returns what is true of every key of an existing tenant, without a key. `models` is the key's own list."""
    (tenant,), of_models, permitted, budget_rows, adjustments, quota_rows = await select_together(
        conn,
        {"tenant_id": tenant_id},
        _TENANT,
        tenants.MODEL_LIMITS,
        model_permissions.OF_TENANT,
        budgets.OF_TENANT,
        budgets.ADJUSTMENTS,
        quotas.OF_TENANT,
    )
    by_model = tenants.limits_of(of_models)
    permissions = model_permissions.permissions_of(permitted)
    return Principal(
        kind="tenant",
        tenant_id=tenant_id,
        key_id="",
        scopes=frozenset(),
        tenant_status=tenant.status,
        models=permissions.narrow(models),
        denied_models=permissions.denied,
        tenant_limits=shaped(Limits, tenant),
        model_limits=tuple((model, entry.limits) for model, entry in sorted(by_model.items())),
        weight=tenant.weight_percent / 100,
        cache=shares.cache_share(tenant),
        time_zone=tenant.time_zone,
        version=tenant.version,
        budgets=tuple(budgets.whole(budget_rows, adjustments)),
        quotas=quotas.quotas_of(quota_rows),
        stores_responses=tenant.stores_responses,
        buys_overflow=tenant.buys_overflow,
    )


async def of_key(conn: AsyncConnection, key: ApiKeyInfo) -> Principal:
    """Returns what binds the requests of a key, whether it could ask now or not."""
    whole = await of_tenant(conn, key.tenant_id, key.models)
    return msgspec.structs.replace(whole, key_id=key.id, key_limits=key.limits)


async def _principal(
    conn: AsyncConnection, key: Row[Any], batch_id: str | None = None, until: int | None = None
) -> Principal:
    whole = await of_tenant(conn, key.tenant_id, None if key.models is None else frozenset(key.models))
    kind: Literal["operator", "tenant"] = "operator" if key.kind == "admin" else "tenant"
    return msgspec.structs.replace(
        whole,
        kind="batch" if batch_id else kind,
        key_id=key.id,
        scopes=frozenset(key.scopes) - ({delegation.SCOPE} if batch_id else set()),
        addresses=None if key.addresses is None or batch_id else tuple(key.addresses),
        key_limits=shaped(Limits, key),
        expires_at=until,
        version=max(key.version, whole.version),
        batch_id=batch_id,
    )
