"""Upstreams that were declared over the API: rows with a sealed credential. The module knows no HTTP and no provider.

The credential is encrypted by AES-GCM under a key that the master key derives, and bound to the upstream's name. It is
written to no log and to no row of the audit log.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import msgspec
from sqlalchemy import delete, func, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database import auth_epoch
from accounting.database.sealing import seal, unseal
from accounting.tables.upstream_models import UpstreamRow
from accounting.values.errors import ConflictError, NotFoundError

MAX_UPSTREAMS = 64


class StoredUpstream(msgspec.Struct, frozen=True):
    name: str
    declared: Mapping[str, Any]
    sealed_key: bytes
    created_at: int


def sealing_key(master: bytes) -> bytes:
    return hmac.digest(master, b"headgate upstream credentials", sha256)


def opened(key: bytes, stored: StoredUpstream) -> str:
    """Decrypt a credential. Raises `SealBroken`."""
    return unseal(key, stored.sealed_key, _place(stored.name)).decode() if stored.sealed_key else ""


async def add(
    conn: AsyncConnection, name: str, declared: Mapping[str, Any], credential: str, *, key: bytes, now: int, actor: str
) -> StoredUpstream:
    """Store an upstream. Raises ConflictError for a name that is taken, or if there are too many."""
    if await conn.scalar(select(UpstreamRow.name).where(UpstreamRow.name == name)) is not None:
        raise ConflictError("An upstream has this name already: remove it first.")
    if (await conn.scalar(select(func.count()).select_from(UpstreamRow)) or 0) >= MAX_UPSTREAMS:
        raise ConflictError(f"There are at most {MAX_UPSTREAMS} upstreams.")
    sealed = seal(key, credential.encode(), _place(name)) if credential else b""
    stored = StoredUpstream(name, declared, sealed, now)
    values = {"name": name, "declared": msgspec.json.encode(declared).decode(), "sealed_key": sealed, "created_at": now}
    await conn.execute(insert(UpstreamRow).values(**values))
    detail = {
        "kind": declared.get("kind"),
        "models": sorted(declared.get("models", {})),
        "has_credential": bool(sealed),
    }
    await auth_epoch.record(conn, "headgate.upstream.created", actor=actor, now=now, object_id=name, detail=detail)
    return stored


async def remove(conn: AsyncConnection, name: str, *, now: int, actor: str) -> None:
    """Delete an upstream with its credential. Raises NotFoundError."""
    if (await conn.execute(delete(UpstreamRow).where(UpstreamRow.name == name))).rowcount != 1:
        raise NotFoundError("No such upstream was added over the API.")
    await auth_epoch.record(conn, "headgate.upstream.deleted", actor=actor, now=now, object_id=name)


async def all_stored(conn: AsyncConnection) -> list[StoredUpstream]:
    rows = await conn.execute(select(UpstreamRow.__table__).order_by(UpstreamRow.name))
    return [StoredUpstream(row.name, msgspec.json.decode(row.declared), row.sealed_key, row.created_at) for row in rows]


def _place(name: str) -> bytes:
    return b"credential of upstream " + name.encode()
