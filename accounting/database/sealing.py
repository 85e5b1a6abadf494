"""Texts at rest: a data key per tenant, wrapped by the master key, and AES-GCM around every value (security.md 9).

Without a tenant's row in `data_key` its texts cannot be read by anybody: that is how they are erased. Knows bytes;
not what they mean, nor where they lie.
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
    """Another key, another place, or damaged bytes."""


async def data_key(conn: AsyncConnection, master: bytes, tenant_id: str, now: int) -> bytes:
    """The tenant's key; made when it is first needed, so the connection must be a writing one then."""
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
    """`place` names where the value lies, so that it cannot be moved to another place unnoticed."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    return nonce + AESGCM(key).encrypt(nonce, value, place)


def unseal(key: bytes, sealed: bytes, place: bytes) -> bytes:
    """Raises `SealBroken`."""
    try:
        return AESGCM(key).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], place)
    except (InvalidTag, ValueError):
        raise SealBroken("A stored text cannot be decrypted.") from None


def _place(tenant_id: str) -> bytes:
    return b"data key of " + tenant_id.encode()
