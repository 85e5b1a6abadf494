"""Every typed key of the application and of a request. State lives under these; there are no module globals."""

from __future__ import annotations

from collections.abc import Callable

import redis.asyncio
from aiohttp import web

from accounting.db import Database
from accounting.file_store import FileStore
from accounting.types import Principal
from gateway.claimed_key import ClaimedKey
from gateway.doorbell import Doorbell
from gateway.lifecycle import Detached, Lifecycle
from gateway.metering import Metering
from gateway.models import Models
from gateway.prefixes import Filler, PublicPrefixes
from gateway.routes.table import Route
from gateway.seals import Seals
from gateway.settings import GatewaySettings
from gateway.stream import Engine
from gateway.telemetry.record import RequestRecord
from gateway.telemetry.tracing import Tracing

SETTINGS = web.AppKey("settings", GatewaySettings)
ROUTES = web.AppKey("routes", dict[web.AbstractRoute, Route])
LIFECYCLE = web.AppKey("lifecycle", Lifecycle)
DETACHED = web.AppKey("detached", Detached)
REDIS = web.AppKey("redis", redis.asyncio.Redis)
DATABASE = web.AppKey("database", Database)
MODELS = web.AppKey("models", Models)
METERING = web.AppKey("metering", Metering)
ENGINE = web.AppKey("engine", Engine)
PREFIXES = web.AppKey("prefixes", PublicPrefixes)
FILLER = web.AppKey("filler", Filler)
PEPPER = web.AppKey("pepper", bytes)
SEALS = web.AppKey("seals", Seals)
FILES = web.AppKey("files", FileStore)
DOORBELL = web.AppKey("doorbell", Doorbell)
TRACING = web.AppKey("tracing", Tracing)
CACHE_SECRET = web.AppKey("cache_secret", bytes)
OBSERVERS = web.AppKey("observers", list[Callable[[RequestRecord], None]])
"""Called once per request after its end: access log, metrics, request log, tracing."""

RECORD = web.RequestKey("record", RequestRecord)
PRINCIPAL = web.RequestKey("principal", Principal)
CLAIMED_KEY = web.RequestKey("claimed_key", ClaimedKey)
"""Only in a request with an Idempotency-Key that is its to run."""
EXPECTS_CONTINUE = web.RequestKey("expects_continue", bool)
