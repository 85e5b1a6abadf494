"""What a gateway process holds from its start to its end: one async generator per resource, in order of need."""

from __future__ import annotations

from collections.abc import AsyncIterator

import redis.asyncio
from aiohttp import web

from accounting.types import Principal
from gateway import keys
from gateway.auth import AUTH, Authenticator
from gateway.telemetry import logs
from gateway.telemetry.metrics import METRICS, Metrics


async def telemetry(app: web.Application) -> AsyncIterator[None]:
    app[METRICS] = Metrics(app[keys.SETTINGS].slot)
    app[keys.OBSERVERS] += [logs.access, app[METRICS].observe]
    yield


async def limiter(app: web.Application) -> AsyncIterator[None]:
    """The Redis client. It connects when it is first used: Redis may be away at the start."""
    app[keys.REDIS] = client = redis.asyncio.from_url(app[keys.SETTINGS].redis_url)
    yield
    await client.aclose()


async def identities(app: web.Application) -> AsyncIterator[None]:
    async def nobody(key: str) -> Principal | None:
        return None

    app[AUTH] = Authenticator(nobody, lambda key: True)
    yield


async def detached(app: web.Application) -> AsyncIterator[None]:
    """Ends first (last in the list): settlements still need everything above."""
    yield
    await app[keys.DETACHED].join(10.0)


async def started(app: web.Application) -> AsyncIterator[None]:
    app[keys.LIFECYCLE].started = True
    yield


ALL = [telemetry, limiter, identities, detached, started]
