"""Sessions of the console. A cookie holds a random secret; Redis holds the API key, encrypted under that secret.

Neither alone opens a session: who reads Redis has no secret, who has the cookie needs the entry, and signing out
deletes the entry. The key is checked anew for every page, so a revoked key ends its sessions at once.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Awaitable
from typing import cast

import redis.asyncio
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from redis.exceptions import RedisError

from gateway.base import errors
from gateway.limiter.redis_keys import CONSOLE_SESSION, CONSOLE_SESSIONS

LIFE_S = 12 * 3600
MAX_SESSIONS = 20
"""The sessions that a key has at most. One more ends the oldest, so that nobody fills Redis by signing in."""
_SECRET_BYTES = 32
_SECRET_CHARS = 43
_NONCE_BYTES = 12


class Session:
    """An open session: its secret, and the key that signed in."""

    def __init__(self, secret: str, key: str) -> None:
        self.secret = secret
        self.key = key

    @property
    def form_token(self) -> str:
        """The token that each form of this session carries. A page of another site cannot know it."""
        return _derived(self.secret, b"form").hex()

    def accepts(self, form_token: str) -> bool:
        return form_token.isascii() and hmac.compare_digest(form_token, self.form_token)


async def begin(client: redis.asyncio.Redis, key: str) -> Session:
    """Makes a session with a new secret, whatever cookie the browser sent. Raises `ApiError` 503."""
    secret = secrets.token_urlsafe(_SECRET_BYTES)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    sealed = nonce + AESGCM(_derived(secret, b"key")).encrypt(nonce, key.encode(), None)
    try:
        await client.set(_name(secret), sealed, ex=LIFE_S)
        await _end_oldest(client, key, _name(secret))
    except (RedisError, OSError):
        raise _unavailable() from None
    return Session(secret, key)


async def _end_oldest(client: redis.asyncio.Redis, key: str, newest: str) -> None:
    of_key = CONSOLE_SESSIONS + _derived(key, b"sessions").hex()
    await client.lpush(of_key, newest)
    await client.expire(of_key, LIFE_S)
    oldest = await cast(Awaitable[list[bytes]], client.lrange(of_key, MAX_SESSIONS, -1))
    await cast(Awaitable[str], client.ltrim(of_key, 0, MAX_SESSIONS - 1))
    if oldest:
        await client.delete(*oldest)


async def find(client: redis.asyncio.Redis, secret: str) -> Session | None:
    """Returns the session of a cookie, or None if there is none. Raises `ApiError` 503."""
    if not _may_be(secret):
        return None
    try:
        sealed = cast(bytes | None, await client.get(_name(secret)))
    except (RedisError, OSError):
        raise _unavailable() from None
    if sealed is None:
        return None
    try:
        key = AESGCM(_derived(secret, b"key")).decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], None)
    except (InvalidTag, ValueError):
        return None
    return Session(secret, key.decode())


async def end(client: redis.asyncio.Redis, secret: str) -> None:
    """Deletes a session. Raises `ApiError` 503."""
    if not _may_be(secret):
        return
    try:
        await client.delete(_name(secret))
    except (RedisError, OSError):
        raise _unavailable() from None


def _may_be(secret: str) -> bool:
    """Returns whether a cookie's value can be a secret of ours. Others hold any text, also one that has no bytes."""
    return len(secret) == _SECRET_CHARS and secret.isascii()


def _name(secret: str) -> str:
    return CONSOLE_SESSION + _derived(secret, b"name").hex()


def _derived(secret: str, purpose: bytes) -> bytes:
    return hmac.digest(secret.encode(), b"headgate console " + purpose, hashlib.sha256)


def _unavailable() -> errors.ApiError:
    return errors.unavailable("sessions_unavailable", "Redis does not answer, so nobody can sign in now.")
