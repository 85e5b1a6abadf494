"""Upstreams that were declared over the API: rows with sealed credentials. The module knows no HTTP and no provider.

Its credentials, one for requests and perhaps one for its cost API, are encrypted by AES-GCM under a key that the master key
derives, and bound to the upstream's name and their purpose. They are written to no log and to no row of the audit log.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import msgspec
from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database import auth_epoch
from accounting.database.sealing import opens, seal, unseal
from accounting.tables.upstream_models import UpstreamRow
from accounting.values.errors import ConflictError, NotFoundError

MAX_UPSTREAMS = 64


class StoredUpstream(msgspec.Struct, frozen=True):
    name: str
    declared: Mapping[str, Any]
    sealed_key: bytes
    created_at: int
    sealed_cost_key: bytes = b""
    """The credential of the cost API."""


def sealing_key(master: bytes) -> bytes:
    return hmac.digest(master, b"headgate upstream credentials", sha256)


def opened(key: bytes, stored: StoredUpstream) -> str:
    """Decrypts a credential. Raises `SealBroken`."""
    return unseal(key, stored.sealed_key, _place(stored.name)).decode() if stored.sealed_key else ""


def opened_for_costs(key: bytes, stored: StoredUpstream) -> str:
    """Decrypts the credential of the cost API. Raises `SealBroken`."""
    return unseal(key, stored.sealed_cost_key, _cost_place(stored.name)).decode() if stored.sealed_cost_key else ""


async def add(
    conn: AsyncConnection,
    name: str,
    declared: Mapping[str, Any],
    credential: str,
    *,
    key: bytes,
    now: int,
    actor: str,
    cost_credential: str = "",
) -> StoredUpstream:
    """Stores an upstream. Raises ConflictError for a name that is taken, or if there are too many."""
    if await conn.scalar(select(UpstreamRow.name).where(UpstreamRow.name == name)) is not None:
        raise ConflictError("An upstream has this name already: remove it first.")
    if (await conn.scalar(select(func.count()).select_from(UpstreamRow)) or 0) >= MAX_UPSTREAMS:
        raise ConflictError(f"There are at most {MAX_UPSTREAMS} upstreams.")
    sealed = seal(key, credential.encode(), _place(name)) if credential else b""
    sealed_for_costs = seal(key, cost_credential.encode(), _cost_place(name)) if cost_credential else b""
    stored = StoredUpstream(name, declared, sealed, now, sealed_for_costs)
    values = {"name": name, "declared": msgspec.json.encode(declared).decode(), "sealed_key": sealed, "created_at": now}
    await conn.execute(insert(UpstreamRow).values(**values, sealed_cost_key=sealed_for_costs or None))
    detail = {
        "kind": declared.get("kind"),
        "models": sorted(declared.get("models", {})),
        "has_credential": bool(sealed),
        "has_cost_credential": bool(sealed_for_costs),
    }
    await auth_epoch.record(conn, "headgate.upstream.created", actor=actor, now=now, object_id=name, detail=detail)
    return stored


async def remove(conn: AsyncConnection, name: str, *, now: int, actor: str) -> None:
    """Deletes an upstream with its credential. Raises NotFoundError."""
    if (await conn.execute(delete(UpstreamRow).where(UpstreamRow.name == name))).rowcount != 1:
        raise NotFoundError("No such upstream was added over the API.")
    await auth_epoch.record(conn, "headgate.upstream.deleted", actor=actor, now=now, object_id=name)


async def all_stored(conn: AsyncConnection) -> list[StoredUpstream]:
    rows = await conn.execute(select(UpstreamRow.__table__).order_by(UpstreamRow.name))
    return [
        StoredUpstream(
            row.name, msgspec.json.decode(row.declared), row.sealed_key, row.created_at, row.sealed_cost_key or b""
        )
        for row in rows
    ]


async def rewrap(conn: AsyncConnection, old: bytes, new: bytes) -> int:
    """Seals every credential with another master key. Returns how many there are. Raises `SealBroken`."""
    was, becomes = sealing_key(old), sealing_key(new)
    num_sealed = 0
    for stored in await all_stored(conn):
        values = {}
        if stored.sealed_key:
            values["sealed_key"] = seal(becomes, opened(was, stored).encode(), _place(stored.name))
        if stored.sealed_cost_key:
            secret = opened_for_costs(was, stored).encode()
            values["sealed_cost_key"] = seal(becomes, secret, _cost_place(stored.name))
        if values:
            await conn.execute(update(UpstreamRow).where(UpstreamRow.name == stored.name).values(**values))
        num_sealed += len(values)
    return num_sealed


async def is_wrapped(conn: AsyncConnection, master: bytes) -> bool | None:
    """Says whether credentials are sealed with this master key; one tells of all, because they change together. None means
    that there are none."""
    key = sealing_key(master)
    for stored in await all_stored(conn):
        if stored.sealed_key:
            return opens(key, stored.sealed_key, _place(stored.name))
        if stored.sealed_cost_key:
            return opens(key, stored.sealed_cost_key, _cost_place(stored.name))
    return None


def _place(name: str) -> bytes:
    return b"credential of upstream " + name.encode()


def _cost_place(name: str) -> bytes:
    return b"credential of the cost API of upstream " + name.encode()
