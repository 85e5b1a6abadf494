"""The last verdict on the books, kept in Redis so that every gateway shows it. It is only a hint: it can be made again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgspec
import redis.asyncio
from redis.exceptions import RedisError

from gateway.base.redis_link import LimiterUnavailable, RedisLink
from gateway.limiter.redis_keys import VERDICT_KEY


async def keep(client: redis.asyncio.Redis, verdict: Mapping[str, Any]) -> None:
    """Keeps the verdict. While Redis does not answer it is not kept, and the caller still has it."""
    try:
        await client.set(VERDICT_KEY, msgspec.json.encode(verdict))
    except (RedisError, OSError):
        return


async def keep_by(link: RedisLink, verdict: Mapping[str, Any]) -> None:
    """Does the same over the limiter's link, for a command that has no other."""
    try:
        await link.command("SET", VERDICT_KEY, msgspec.json.encode(verdict))
    except LimiterUnavailable:
        return


async def last(client: redis.asyncio.Redis) -> dict[str, Any] | None:
    """Returns the last verdict, or None if there was none or Redis does not answer."""
    try:
        kept = cast(bytes | None, await client.get(VERDICT_KEY))
    except (RedisError, OSError):
        return None
    return None if kept is None else cast(dict[str, Any], msgspec.json.decode(kept))
