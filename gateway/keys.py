"""Every typed key of the application and of a request. State lives under these; there are no module globals."""

from __future__ import annotations

from collections.abc import Callable

import redis.asyncio
from aiohttp import web

from accounting.db import Database
from accounting.file_store import FileStore
from accounting.types import Principal
from gateway.adapters import AdapterKeeper
from gateway.addresses import UnlistedProxy
from gateway.claimed_key import ClaimedKey
from gateway.doorbell import Doorbell
from gateway.fingerprints import Fingerprint
from gateway.intake import Intake, Share
from gateway.last_use import LastUse
from gateway.lifecycle import Detached, Lifecycle
from gateway.metering import Metering
from gateway.models import Models
from gateway.prefixes import Filler, PublicPrefixes
from gateway.retries import Attempt, Retries
from gateway.routes.table import Route
from gateway.running import KeyConnections, Running
from gateway.seals import Seals
from gateway.settings import GatewaySettings
from gateway.spending import OrganizationLimit
from gateway.stream import Engine
from gateway.telemetry.record import RequestRecord
from gateway.telemetry.tracing import Tracing
from gateway.text_work import TextWork
from gateway.throttle import AdaptiveThrottle

SETTINGS = web.AppKey("settings", GatewaySettings)
ROUTES = web.AppKey("routes", dict[web.AbstractRoute, Route])
LIFECYCLE = web.AppKey("lifecycle", Lifecycle)
DETACHED = web.AppKey("detached", Detached)
REDIS = web.AppKey("redis", redis.asyncio.Redis)
DATABASE = web.AppKey("database", Database)
INTAKE = web.AppKey("intake", Intake)
TEXT_WORK = web.AppKey("text_work", TextWork)
MODELS = web.AppKey("models", Models)
METERING = web.AppKey("metering", Metering)
ENGINE = web.AppKey("engine", Engine)
RUNNING = web.AppKey("running", Running)
THROTTLE = web.AppKey("throttle", AdaptiveThrottle)
SPENDING = web.AppKey("spending", OrganizationLimit)
UNLISTED_PROXY = web.AppKey("unlisted_proxy", UnlistedProxy)
LAST_USE = web.AppKey("last_use", LastUse)
KEY_CONNECTIONS = web.AppKey("key_connections", KeyConnections)
PREFIXES = web.AppKey("prefixes", PublicPrefixes)
ADAPTERS = web.AppKey("adapters", AdapterKeeper)
FILLER = web.AppKey("filler", Filler)
PEPPER = web.AppKey("pepper", bytes)
SEALS = web.AppKey("seals", Seals)
FILES = web.AppKey("files", FileStore)
KEYED = web.AppKey("keyed", set[str])
"""Requests of this process that run, or are about to, under an Idempotency-Key."""
RETRIES = web.AppKey("retries", Retries)
DOORBELL = web.AppKey("doorbell", Doorbell)
TRACING = web.AppKey("tracing", Tracing)
CACHE_SECRET = web.AppKey("cache_secret", bytes)
GROUP_KEY = web.AppKey("group_key", bytes)
"""What group hashes are keyed with; workers are told it, unlike the secret of region ids."""
OBSERVERS = web.AppKey("observers", list[Callable[[RequestRecord], None]])
"""Called once per request after its end: access log, metrics, request log, tracing."""

RECORD = web.RequestKey("record", RequestRecord)
PRINCIPAL = web.RequestKey("principal", Principal)
CLAIMED_KEY = web.RequestKey("claimed_key", ClaimedKey)
"""Only in a request with an Idempotency-Key that is its to run."""
ATTEMPT = web.RequestKey("attempt", Attempt)
"""Only in a tenant's request without such a key."""
FINGERPRINT = web.RequestKey("fingerprint", Fingerprint)
"""Only in a request whose repeat may have to be known."""
SHARE = web.RequestKey("share", Share)
"""Of the bytes that may be held; given back when the request has ended."""
NUM_BODY_BYTES = web.RequestKey("num_body_bytes", int)
"""Of a JSON body, as it came."""
EXPECTS_CONTINUE = web.RequestKey("expects_continue", bool)
