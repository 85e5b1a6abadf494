"""Api keys in SQL: create, find, change, revoke. The secret leaves `create` once and is nowhere else.

Every change raises the auth epoch, so that all gateways see it. Changes of use (`touch`) do not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import Row, Select, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting import changes
from accounting.changes import SYSTEM
from accounting.credentials import Kind, batch_credential, generate, keyed_hash, parse, verify
from accounting.errors import InvalidError, NotFoundError
from accounting.ids import new_id
from accounting.models import ApiKey
from accounting.paging import Page, newest_first
from accounting.types import OPERATOR_TENANT, ApiKeyInfo, Limits, NewApiKey

TENANT_SCOPES = frozenset(
    {"chat", "embeddings", "batch", "files:read", "files:write", "usage:read"}
)
ADMIN_SCOPES = frozenset({"admin"})
LAST_USED_GRAIN_S = 60

# The text of keys is credentials.py's; callers find all of a key's verbs here.
__all__ = [
    "batch_credential", "change", "create", "generate", "get", "keyed_hash", "list_keys", "lookup", "parse",
    "revoke", "set_limits", "touch", "verify",
]  # fmt: skip


async def create(
    conn: AsyncConnection,
    pepper: bytes,
    *,
    tenant_id: str,
    now: int,
    kind: Kind = "live",
    name: str | None = None,
    service_account_id: str | None = None,
    scopes: Collection[str] = (),
    models: Collection[str] | None = None,
    expires_at: int | None = None,
    actor: str = SYSTEM,
) -> NewApiKey:
    """Admin keys belong to the operator's tenant, and only they do. No scopes: all that the kind may have."""
    if (kind == "admin") != (tenant_id == OPERATOR_TENANT):
        raise InvalidError("Admin keys belong to the operator, all others to a tenant.", "kind")
    value = generate(kind)
    parsed = parse(value)
    assert parsed is not None
    key_id = new_id("key")
    version = await changes.record(
        conn,
        "api_key.created",
        actor=actor,
        now=now,
        tenant_id=tenant_id,
        object_id=key_id,
        detail={"kind": kind},
    )
    await conn.execute(
        insert(ApiKey).values(
            id=key_id, public_id=parsed.public_id, kind=kind, tenant_id=tenant_id,
            service_account_id=service_account_id, name=name, hash=keyed_hash(pepper, value),
            scopes=sorted(_scopes(kind, scopes)), models=None if models is None else sorted(models),
            created_at=now, expires_at=expires_at, version=version,
        )
    )  # fmt: skip
    return NewApiKey(await get(conn, tenant_id, key_id), value)


async def lookup(conn: AsyncConnection, public_id: str) -> Row[Any] | None:
    """The whole row with its hash, for authentication alone (principals.py)."""
    query = select(ApiKey.__table__).where(ApiKey.public_id == public_id)
    return (await conn.execute(query)).first()


async def get(conn: AsyncConnection, tenant_id: str, key_id: str) -> ApiKeyInfo:
    """NotFoundError also for another tenant's key and for a revoked one."""
    row = (await conn.execute(_living(tenant_id).where(ApiKey.id == key_id))).first()
    if row is None:
        raise NotFoundError("No such API key.")
    return key_info(row)


async def list_keys(
    conn: AsyncConnection, tenant_id: str, *, after: str | None = None, limit: int = 20
) -> Page[ApiKeyInfo]:
    page = await newest_first(conn, _living(tenant_id), ApiKey.created_at, ApiKey.id, after, limit)
    return Page([key_info(row) for row in page.items], page.has_more)


async def change(
    conn: AsyncConnection,
    tenant_id: str,
    key_id: str,
    *,
    now: int,
    scopes: Collection[str] | None = None,
    expires_at: int | None = None,
    actor: str = SYSTEM,
) -> ApiKeyInfo:
    """None: unchanged. An expired key stays what it is."""
    present = await get(conn, tenant_id, key_id)
    if present.expires_at is not None and present.expires_at <= now:
        raise InvalidError("The API key has expired.")
    values: dict[str, Any] = {}
    if scopes is not None:
        values["scopes"] = sorted(_scopes(present.kind, scopes))
    if expires_at is not None:
        values["expires_at"] = expires_at
    await _update(conn, tenant_id, key_id, values, "api_key.updated", now, actor)
    return await get(conn, tenant_id, key_id)


async def set_limits(
    conn: AsyncConnection,
    tenant_id: str,
    key_id: str,
    limits: Limits,
    *,
    now: int,
    actor: str = SYSTEM,
) -> None:
    await get(conn, tenant_id, key_id)
    values = {name: getattr(limits, name) for name in limits.__struct_fields__}
    await _update(conn, tenant_id, key_id, values, "api_key.updated", now, actor)


async def revoke(
    conn: AsyncConnection, tenant_id: str, key_id: str, *, now: int, actor: str = SYSTEM
) -> None:
    await get(conn, tenant_id, key_id)
    await _update(conn, tenant_id, key_id, {"revoked_at": now}, "api_key.deleted", now, actor)


async def touch(conn: AsyncConnection, used_at: Mapping[str, int]) -> None:
    """Last use by key id, to the minute; not a change, so neither epoch nor audit."""
    for key_id, at in sorted(used_at.items()):
        stale = or_(ApiKey.last_used_at.is_(None), ApiKey.last_used_at <= at - LAST_USED_GRAIN_S)
        await conn.execute(update(ApiKey).where(ApiKey.id == key_id, stale).values(last_used_at=at))


def key_info(row: Row[Any]) -> ApiKeyInfo:
    return ApiKeyInfo(
        id=row.id, public_id=row.public_id, kind=row.kind, tenant_id=row.tenant_id,
        service_account_id=row.service_account_id, name=row.name, scopes=frozenset(row.scopes),
        models=None if row.models is None else frozenset(row.models), created_at=row.created_at,
        expires_at=row.expires_at, last_used_at=row.last_used_at, revoked_at=row.revoked_at,
        limits=Limits(row.requests_per_minute, row.tokens_per_minute, row.concurrency),
    )  # fmt: skip


def _living(tenant_id: str) -> Select[Any]:
    return select(ApiKey.__table__).where(
        ApiKey.tenant_id == tenant_id, ApiKey.revoked_at.is_(None)
    )


def _scopes(kind: Kind, asked: Collection[str]) -> frozenset[str]:
    allowed = ADMIN_SCOPES if kind == "admin" else TENANT_SCOPES
    unknown = sorted(set(asked) - allowed)
    if unknown:
        raise InvalidError(
            "A scope in the list does not exist or is not for this kind of key.", "scopes"
        )
    return frozenset(asked) or allowed


async def _update(
    conn: AsyncConnection,
    tenant_id: str,
    key_id: str,
    values: dict[str, Any],
    event: str,
    now: int,
    actor: str,
) -> None:
    version = await changes.record(
        conn, event, actor=actor, now=now, tenant_id=tenant_id, object_id=key_id, detail=values
    )
    await conn.execute(update(ApiKey).where(ApiKey.id == key_id).values(**values, version=version))
