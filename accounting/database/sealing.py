"""Encryption of texts at rest: each tenant has a data key, which the master key wraps, and every value is encrypted by
AES-GCM (security.md 9).

Once a tenant's row in `data_key` is deleted, nobody can read its texts: that is how they are erased. The module knows
bytes, but neither their meaning nor where they are stored.
"""

from __future__ import annotations

import hmac
import secrets
from hashlib import sha256

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database.db import upsert
from accounting.tables.batch_models import DataKey
from accounting.tables.models import Tenant
from accounting.values.errors import AccountingError, NotFoundError

KEY_BYTES, NONCE_BYTES, TAG_BYTES = 32, 12, 16


class SealBroken(AccountingError):
    """The bytes were sealed with another key, belong to another place, or are damaged."""


async def data_key(conn: AsyncConnection, master: bytes, tenant_id: str, now: int) -> bytes:
    """Returns the tenant's key. It is made when it is first needed, so the connection must be a writing one then.
    Raises NotFoundError for a tenant that is erased."""
    query = select(DataKey.wrapped).where(DataKey.tenant_id == tenant_id)
    wrapping = _wrapping(master)
    wrapped = await conn.scalar(query)
    if wrapped is None:
        erased = select(Tenant.erased_at).where(Tenant.id == tenant_id)
        if await conn.scalar(erased.with_for_update(read=True, key_share=True)) is not None:
            raise NotFoundError("The tenant was erased.")
        fresh = seal(wrapping, secrets.token_bytes(KEY_BYTES), _place(tenant_id))
        statement = upsert(conn, DataKey.__table__).values(tenant_id=tenant_id, wrapped=fresh, created_at=now)
        await conn.execute(statement.on_conflict_do_nothing())
        wrapped = await conn.scalar(query)
        assert wrapped is not None
    return unseal(wrapping, wrapped, _place(tenant_id))


async def rewrap(conn: AsyncConnection, old: bytes, new: bytes) -> int:
    """Wraps every tenant's data key with another master key. Returns how many there are. Raises `SealBroken`."""
    rows = (await conn.execute(select(DataKey.tenant_id, DataKey.wrapped))).all()
    for row in rows:
        place = _place(row.tenant_id)
        wrapped = seal(_wrapping(new), unseal(_wrapping(old), row.wrapped, place), place)
        await conn.execute(update(DataKey).where(DataKey.tenant_id == row.tenant_id).values(wrapped=wrapped))
    return len(rows)


async def is_wrapped(conn: AsyncConnection, master: bytes) -> bool | None:
    """Says whether data keys are wrapped by this master key; one tells of all, because they change together. None means
    that there are none."""
    row = (await conn.execute(select(DataKey.tenant_id, DataKey.wrapped).limit(1))).first()
    return None if row is None else opens(_wrapping(master), row.wrapped, _place(row.tenant_id))


def opens(key: bytes, sealed: bytes, place: bytes) -> bool:
    try:
        unseal(key, sealed, place)
    except SealBroken:
        return False
    return True


def seal(key: bytes, value: bytes, place: bytes) -> bytes:
    """Encrypts a value. `place` names where it is stored, so that it cannot be moved elsewhere unnoticed."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    return nonce + AESGCM(key).encrypt(nonce, value, place)


def unseal(key: bytes, sealed: bytes, place: bytes) -> bytes:
    """Decrypts a value. Raises `SealBroken`."""
    try:
        return AESGCM(key).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], place)
    except (InvalidTag, ValueError):
        raise SealBroken("A stored text cannot be decrypted.") from None


def _wrapping(master: bytes) -> bytes:
    return hmac.digest(master, b"headgate data keys", sha256)


def _place(tenant_id: str) -> bytes:
    return b"data key of " + tenant_id.encode()
