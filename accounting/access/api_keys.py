"""API keys in SQL: create, find, change, revoke. `create` and `rotate` return the secret once; it is stored nowhere.

Every change raises the auth epoch, so that all gateways see it. `touch`, which notes the last use, does not raise
it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import Row, Select, bindparam, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.access import delegation
from accounting.access.credentials import Kind, generate, keyed_hash, parse, verify
from accounting.database import audit, auth_epoch
from accounting.database.auth_epoch import SYSTEM
from accounting.database.db import among
from accounting.database.driver_selects import select_together
from accounting.database.paging import Page, newest_first, one, shaped
from accounting.events import events, outbox
from accounting.tables.models import ApiKey, AuthEpoch, Tenant
from accounting.values import texts
from accounting.values.errors import InvalidError
from accounting.values.ids import new_id
from accounting.values.tenant_types import ApiKeyInfo, KeyChanges, NewApiKey, StreamsEnd
from accounting.values.types import OPERATOR_TENANT, Limits

ALL_OF_TENANT = frozenset({"chat", "embeddings", "batch", "files:read", "files:write", "usage:read"})
"""The scopes of a tenant's key that was asked for without any."""
TENANT_SCOPES = ALL_OF_TENANT | {delegation.SCOPE}
ADMIN_SCOPES = frozenset({"admin", "admin:read"})
ALL_OF_ADMIN = frozenset({"admin"})
"""The scopes of an admin key that was asked for without any."""
_WHOLE = select(ApiKey.__table__).where(ApiKey.public_id == bindparam("public_id"))
_HASHES = (
    select(ApiKey.hash, ApiKey.previous_hash, ApiKey.previous_until)
    .select_from(AuthEpoch)
    .outerjoin(ApiKey, ApiKey.public_id == bindparam("public_id"))
    .where(AuthEpoch.id == 1)
)
_TOUCH = (
    update(ApiKey)
    .where(
        ApiKey.id == bindparam("key_id"), or_(ApiKey.last_used_at.is_(None), ApiKey.last_used_at <= bindparam("stale"))
    )
    .values(last_used_at=bindparam("at"))
)
LAST_USED_GRAIN_S = 60
MAX_OVERLAP_S = 7 * 86_400
MAX_NETWORKS = 100


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
    addresses: Sequence[str] | None = None,
    limits: Limits | None = None,
    expires_at: int | None = None,
    actor: str = SYSTEM,
) -> NewApiKey:
    """Creates a key. Admin keys belong to the operator's tenant, and that tenant has no other keys. Without `scopes`
    the key gets the usual scopes of its kind: all but the one for managing keys. Raises InvalidError."""
    if (kind == "admin") != (tenant_id == OPERATOR_TENANT):
        raise InvalidError("Admin keys belong to the operator, all others to a tenant.", "kind")
    value = generate(kind)
    parsed = parse(value)
    assert parsed is not None
    key_id = new_id("key")
    version = await auth_epoch.record(
        conn,
        "api_key.created",
        actor=actor,
        now=now,
        tenant_id=tenant_id,
        object_id=key_id,
        detail={"kind": kind, "scopes": sorted(_scopes(kind, scopes))},
    )
    await conn.execute(
        insert(ApiKey).values(
            id=key_id,
            public_id=parsed.public_id,
            kind=kind,
            tenant_id=tenant_id,
            service_account_id=service_account_id,
            name=None if name is None else texts.checked_name(name),
            hash=keyed_hash(pepper, value),
            scopes=sorted(_scopes(kind, scopes)),
            models=None if models is None else sorted(models),
            addresses=None if addresses is None else _networks(addresses),
            **msgspec.structs.asdict(limits or Limits()),
            created_at=now,
            expires_at=expires_at,
            version=version,
        )
    )
    return NewApiKey(await get(conn, tenant_id, key_id), value)


async def lookup(conn: AsyncConnection, public_id: str) -> Row[Any] | None:
    """Returns the whole row with its hash. Only authentication (principals.py) uses it."""
    (rows,) = await select_together(conn, {"public_id": public_id}, _WHOLE)
    return next(iter(rows), None)


async def is_genuine(conn: AsyncConnection, pepper: bytes, public_id: str, value: str, now: int) -> bool:
    """Says whether `value` is the secret of the key. An unknown id takes as long as a wrong secret: in both cases one
    narrow row is read and the same comparisons are made."""
    ((row,),) = await select_together(conn, {"public_id": public_id}, _HASHES)
    return _matches(pepper, value, row, now)


async def genuine(conn: AsyncConnection, pepper: bytes, values: Collection[str], now: int) -> set[str]:
    """Returns those of `values` that are secrets of keys, ended keys included. One statement reads all of them."""
    ids = {value: key.public_id for value in values if (key := parse(value)) is not None}
    query = select(ApiKey.public_id, ApiKey.hash, ApiKey.previous_hash, ApiKey.previous_until)
    rows = await conn.execute(query.where(among(conn, ApiKey.public_id, set(ids.values()))))
    by_id = {row.public_id: row for row in rows}
    return {value for value, key_id in ids.items() if _matches(pepper, value, by_id.get(key_id), now)}


def _matches(pepper: bytes, value: str, row: Any, now: int) -> bool:
    """Says whether `value` is the present secret, or the previous one while both are valid. `row` has both hashes; if
    it is None, the same comparisons are made."""
    overlaps = row is not None and (row.previous_until or 0) > now
    current = verify(pepper, value, row.hash if row is not None else None)
    previous = verify(pepper, value, row.previous_hash if row is not None and overlaps else None)
    return current or previous


async def get(conn: AsyncConnection, tenant_id: str, key_id: str) -> ApiKeyInfo:
    """Returns a living key. Raises NotFoundError, also for another tenant's key and for a revoked one."""
    return key_info(await one(conn, _living(tenant_id).where(ApiKey.id == key_id), "There is no such API key."))


async def list_keys(
    conn: AsyncConnection, tenant_id: str, *, after: str | None = None, limit: int = 20, oldest_first: bool = False
) -> Page[ApiKeyInfo]:
    query, ever = _living(tenant_id), select(ApiKey.__table__).where(ApiKey.tenant_id == tenant_id)
    page = await newest_first(conn, query, ApiKey, after, limit, ever=ever, oldest_first=oldest_first)
    return page.of(key_info)


async def num_living(conn: AsyncConnection, tenant_id: str, now: int) -> int:
    """Returns the number of a tenant's keys that are neither revoked nor expired."""
    lasts = or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > now)
    return int(await conn.scalar(select(func.count()).select_from(_living(tenant_id).where(lasts).subquery())) or 0)


async def find(conn: AsyncConnection, key_id: str) -> ApiKeyInfo:
    """Returns a key by its id alone, for the operator; the operator's own keys are found too. Raises NotFoundError."""
    query = select(ApiKey.__table__).where(ApiKey.id == key_id, ApiKey.revoked_at.is_(None))
    return key_info(await one(conn, query, "There is no such API key."))


async def change(
    conn: AsyncConnection,
    tenant_id: str,
    key_id: str,
    wanted: KeyChanges,
    *,
    now: int,
    end_streams: bool = False,
    actor: str = SYSTEM,
) -> ApiKeyInfo:
    """Changes a key. An expired key cannot be changed: InvalidError."""
    present = await get(conn, tenant_id, key_id)
    if present.expires_at is not None and present.expires_at <= now:
        raise InvalidError("The API key has expired.")
    values: dict[str, Any] = msgspec.to_builtins(wanted)
    if "scopes" in values:
        values["scopes"] = sorted(_scopes(present.kind, values["scopes"]))
    if values.get("models") is not None:
        values["models"] = sorted(set(values["models"]))
    if values.get("addresses") is not None:
        values["addresses"] = _networks(values["addresses"])
    await _update(conn, tenant_id, key_id, values, "api_key.updated", now, actor, end_streams)
    return await get(conn, tenant_id, key_id)


async def rotate(
    conn: AsyncConnection, pepper: bytes, key_id: str, overlap_s: int, *, now: int, actor: str
) -> NewApiKey:
    """Gives the key a new secret. The present secret works for `overlap_s` more seconds; a still older one ends now."""
    if not 0 <= overlap_s <= MAX_OVERLAP_S:
        raise InvalidError(f"The overlap is 0 to {MAX_OVERLAP_S} seconds.", "overlap_seconds")
    present = await find(conn, key_id)
    if present.expires_at is not None and present.expires_at <= now:
        raise InvalidError("The API key has expired.")
    value = generate(present.kind, present.public_id)
    replaced = await conn.scalar(select(ApiKey.hash).where(ApiKey.id == key_id))
    values: dict[str, Any] = {
        "hash": keyed_hash(pepper, value),
        "previous_hash": replaced if overlap_s else None,
        "previous_until": now + overlap_s if overlap_s else None,
    }
    version = await _update(
        conn,
        present.tenant_id,
        key_id,
        values,
        "api_key.updated",
        now,
        actor,
        detail={"rotated": True, "overlap_seconds": overlap_s},
    )
    told = events.api_key("rotated", present.tenant_id, key_id, version, now, previous_until=values["previous_until"])
    await outbox.write(conn, [told])
    return NewApiKey(await find(conn, key_id), value)


async def revoke(
    conn: AsyncConnection, tenant_id: str, key_id: str, *, now: int, end_streams: bool = False, actor: str = SYSTEM
) -> None:
    """Revokes a key. With `end_streams`, requests that run under the key end too, on every gateway."""
    await get(conn, tenant_id, key_id)
    values = {"revoked_at": now}
    version = await _update(conn, tenant_id, key_id, values, "api_key.deleted", now, actor, end_streams)
    await outbox.write(conn, [events.api_key("revoked", tenant_id, key_id, version, now)])


async def revoke_leaked(conn: AsyncConnection, pepper: bytes, value: str, *, now: int, actor: str) -> str | None:
    """Revokes a leaked key at once and ends the requests that run under it. Returns its id, or None if no key that works
    has this value."""
    parsed = parse(value)
    row = None
    if parsed is not None and await is_genuine(conn, pepper, parsed.public_id, value, now):
        row = await lookup(conn, parsed.public_id)
    if row is None or row.revoked_at is not None:
        await audit.record(conn, "headgate.leaked_key.reported", actor=actor, now=now, detail={"known": False})
        return None
    values = {"revoked_at": now}
    version = await _update(
        conn, row.tenant_id, row.id, values, "api_key.deleted", now, actor, True, detail={"leaked": True}
    )
    told = events.api_key("revoked", row.tenant_id, row.id, version, now, leaked=True)
    await outbox.write(conn, [told])
    return str(row.id)


async def end_streams_of_tenant(conn: AsyncConnection, tenant_id: str, version: int) -> None:
    """Ends the requests that run under any key of the tenant, on every gateway. `version` is that of the change that
    wants it."""
    mine = update(ApiKey).where(ApiKey.tenant_id == tenant_id)
    await conn.execute(mine.values(streams_ended=version))


async def ended_streams(conn: AsyncConnection, key_ids: Collection[str]) -> dict[str, StreamsEnd]:
    """Returns what ended running requests, by key id."""
    query = (
        select(ApiKey.id, ApiKey.streams_ended, ApiKey.revoked_at, ApiKey.disabled, Tenant.status)
        .join(Tenant, Tenant.id == ApiKey.tenant_id)
        .where(ApiKey.id.in_(key_ids), ApiKey.streams_ended.is_not(None))
    )
    return {
        row.id: StreamsEnd(row.streams_ended, "active" if row.disabled or row.revoked_at is not None else row.status)
        for row in await conn.execute(query)
    }


async def touch(conn: AsyncConnection, used_at: Mapping[str, int]) -> None:
    """Stores the last use by key id, to the minute. This counts as no change: it neither raises the epoch nor is
    audited."""
    uses = [{"key_id": key_id, "at": at, "stale": at - LAST_USED_GRAIN_S} for key_id, at in sorted(used_at.items())]
    if uses:
        await conn.execute(_TOUCH, uses)


def key_info(row: Row[Any]) -> ApiKeyInfo:
    return shaped(
        ApiKeyInfo,
        row,
        scopes=frozenset(row.scopes),
        models=None if row.models is None else frozenset(row.models),
        limits=shaped(Limits, row),
        addresses=None if row.addresses is None else tuple(row.addresses),
    )


def _living(tenant_id: str) -> Select[Any]:
    return select(ApiKey.__table__).where(ApiKey.tenant_id == tenant_id, ApiKey.revoked_at.is_(None))


def _scopes(kind: Kind, asked: Collection[str]) -> frozenset[str]:
    allowed = ADMIN_SCOPES if kind == "admin" else TENANT_SCOPES
    unknown = sorted(set(asked) - allowed)
    if unknown:
        raise InvalidError("A scope in the list does not exist or is not for this kind of key.", "scopes")
    return frozenset(asked) or (ALL_OF_ADMIN if kind == "admin" else ALL_OF_TENANT)


def _networks(asked: Sequence[str]) -> list[str]:
    if not asked or len(asked) > MAX_NETWORKS:
        raise InvalidError(f"A key may be limited to 1 to {MAX_NETWORKS} addresses or networks.", "addresses")
    try:
        return sorted({str(ipaddress.ip_network(value.strip())) for value in asked})
    except ValueError:
        raise InvalidError("Each entry is an address or a network such as 192.0.2.0/24.", "addresses") from None


async def _update(
    conn: AsyncConnection,
    tenant_id: str,
    key_id: str,
    values: dict[str, Any],
    event: str,
    now: int,
    actor: str,
    end_streams: bool = False,
    detail: dict[str, Any] | None = None,
) -> int:
    """Writes `values` and returns the new version. `detail` goes into the audit log where `values` must not appear
    there."""
    version = await auth_epoch.record(
        conn,
        event,
        actor=actor,
        now=now,
        tenant_id=tenant_id,
        object_id=key_id,
        detail=values if detail is None else detail,
    )
    if end_streams:
        values = {**values, "streams_ended": version}
    await conn.execute(update(ApiKey).where(ApiKey.id == key_id).values(**values, version=version))
    return version
