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
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database.db import upsert
from accounting.tables.batch_models import DataKey
from accounting.values.errors import AccountingError

KEY_BYTES, NONCE_BYTES, TAG_BYTES = 32, 12, 16


class SealBroken(AccountingError):
    """The bytes were sealed with another key, belong to another place, or are damaged."""


async def data_key(conn: AsyncConnection, master: bytes, tenant_id: str, now: int) -> bytes:
    """Return the tenant's key. It is made when it is first needed, so the connection must be a writing one then."""
    query = select(DataKey.wrapped).where(DataKey.tenant_id == tenant_id)
    wrapping = hmac.digest(master, b"headgate data keys", sha256)
    wrapped = await conn.scalar(query)
    if wrapped is None:
        fresh = seal(wrapping, secrets.token_bytes(KEY_BYTES), _place(tenant_id))
        statement = upsert(conn, DataKey.__table__).values(tenant_id=tenant_id, wrapped=fresh, created_at=now)
        await conn.execute(statement.on_conflict_do_nothing())
        wrapped = await conn.scalar(query)
        assert wrapped is not None
    return unseal(wrapping, wrapped, _place(tenant_id))


def seal(key: bytes, value: bytes, place: bytes) -> bytes:
    """Encrypt a value. `place` names where it is stored, so that it cannot be moved elsewhere unnoticed."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    return nonce + AESGCM(key).encrypt(nonce, value, place)


def unseal(key: bytes, sealed: bytes, place: bytes) -> bytes:
    """Decrypt a value. Raises `SealBroken`."""
    try:
        return AESGCM(key).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], place)
    except (InvalidTag, ValueError):
        raise SealBroken("A stored text cannot be decrypted.") from None


def _place(tenant_id: str) -> bytes:
    return b"data key of " + tenant_id.encode()
