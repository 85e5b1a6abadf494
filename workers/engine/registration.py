"""The worker's registration: where it listens, written to Redis again and again while it serves.

Redis only stores the address. Without Redis everything goes on.
"""

from __future__ import annotations

import asyncio
import logging

import redis.asyncio
import redis.exceptions

from workers.process.rounds import heed_cancellation
from workers.protocol import registry
from workers.protocol.registry import Registration

logger = logging.getLogger(__name__)


async def keep_registered(registration: Registration, redis_url: str) -> None:
    """Writes the registration every 2 s until it is cancelled, and then deletes it. The first one, and the first after Redis
    was away, is announced. If Redis is away, that is logged once and changes nothing. A server that has become a replica is
    left for the one that a new connection leads to."""
    key, value = registry.worker_key(registration.worker), registry.encode(registration)
    away, is_new = False, True
    replica = [redis.exceptions.ReadOnlyError, redis.exceptions.MasterDownError]
    client = redis.asyncio.Redis.from_url(redis_url, socket_timeout=1, socket_connect_timeout=1, retry_on_error=replica)
    try:
        while True:
            try:
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


async def _deregister(client: redis.asyncio.Redis, key: str, value: bytes) -> None:
    """Deletes the registration, unless a successor in this slot has already written its own."""
    try:
        if await client.get(key) == value:
            await client.delete(key)
    except (redis.exceptions.RedisError, OSError):
        pass  # it expires by itself
    finally:
        await client.aclose()
