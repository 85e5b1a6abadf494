"""The worker's registration: where it listens, written to Redis again and again while it serves.

Redis only stores the address. Without Redis everything goes on. The lock on the journal keeps two workers of one machine
out of a slot; the registration does it for workers of several machines.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection

import msgspec
import redis.asyncio
import redis.exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from workers.process.rounds import heed_cancellation
from workers.protocol import registry
from workers.protocol.registry import Registration

logger = logging.getLogger(__name__)


LOOKS_PER_REFRESH = 4
"""How often another's registration is looked at while it would be refreshed once."""


async def keep_registered(registration: Registration, redis_url: str, predecessor: str = "") -> None:
    """Writes the registration every 2 s until it is cancelled, and then deletes it. It returns only if another worker,
    of another host or home, keeps itself registered in this slot. The first registration, and the first after Redis was
    away, is announced. If Redis is away, that is logged once and changes nothing. `predecessor` is the process that had
    the slot's journal before and is gone: its registration is replaced at once. A server that has become a replica is
    left for the one that a new connection leads to."""
    key, value = registry.worker_key(registration.worker), registry.encode(registration)
    ours = {registration.process, predecessor}
    away, is_new = False, True
    client = redis.asyncio.Redis.from_url(
        redis_url,
        socket_timeout=1,
        socket_connect_timeout=1,
        retry=Retry(NoBackoff(), 0),
        retry_on_error=[redis.exceptions.ReadOnlyError, redis.exceptions.MasterDownError],
    )
    try:
        while True:
            try:
                if await _is_kept_by_another(client, key, ours):
                    return
                await client.set(key, value, ex=registry.REGISTRATION_TTL_S)
                await client.sadd(registry.WORKERS, registration.worker)
                if is_new:
                    await client.publish(registry.NEWS, registration.worker)
                is_new = False
                if away:
                    logger.info("registered again", extra={"event": "registry_back"})
                away = False
            except (redis.exceptions.RedisError, OSError) as error:
                if not away:
                    logger.warning("registry away: %s", error, extra={"event": "registry_away"})
                away = is_new = True
            heed_cancellation()
            await asyncio.sleep(registry.REGISTRATION_REFRESH_S)
    finally:
        await _deregister(client, key, value)


async def _is_kept_by_another(client: redis.asyncio.Redis, key: str, ours: Collection[str]) -> bool:
    """Says whether another process refreshes the registration. That of a process that was killed is waited for, because
    it expires."""
    before_ms = 0
    while True:
        found, left_ms = await client.get(key), await client.pttl(key)
        if not isinstance(found, bytes) or left_ms < 0 or _process(found) in ours:
            return False
        if 0 < before_ms < left_ms:
            return True
        before_ms = left_ms
        heed_cancellation()
        await asyncio.sleep(registry.REGISTRATION_REFRESH_S / LOOKS_PER_REFRESH)


def _process(value: bytes) -> str:
    """Returns the process of a registration, or no name for one that cannot be read."""
    try:
        return registry.decode(value).process
    except msgspec.DecodeError:
        return ""


async def _deregister(client: redis.asyncio.Redis, key: str, value: bytes) -> None:
    """Deletes the registration, unless a successor in this slot has already written its own."""
    try:
        if await client.get(key) == value:
            await client.delete(key)
    except (redis.exceptions.RedisError, OSError):
        pass  # it expires by itself
    finally:
        await client.aclose()
