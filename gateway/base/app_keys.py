"""Application keys of what no other folder makes: settings, connections, secrets and the life of the process. Each
other module defines the key of its own object. There are no module globals.
"""

from __future__ import annotations

from collections.abc import Callable

import redis.asyncio
from aiohttp import web

from accounting.batches.file_store import FileStore
from accounting.database.db import Database
from gateway.base.addresses import UnlistedProxy
from gateway.base.lifecycle import Detached, Lifecycle
from gateway.base.running import KeyConnections, Running
from gateway.base.settings import GatewaySettings

SETTINGS = web.AppKey("settings", GatewaySettings)
LIFECYCLE = web.AppKey("lifecycle", Lifecycle)
DETACHED = web.AppKey("detached", Detached)
REDIS = web.AppKey("redis", redis.asyncio.Redis)
DATABASE = web.AppKey("database", Database)
RUNNING = web.AppKey("running", Running)
UNLISTED_PROXY = web.AppKey("unlisted_proxy", UnlistedProxy)
KEY_CONNECTIONS = web.AppKey("key_connections", KeyConnections)
PEPPER = web.AppKey("pepper", bytes)
FILES = web.AppKey("files", FileStore)
CACHE_SECRET = web.AppKey("cache_secret", bytes)
UPSTREAM_KEY = web.AppKey("upstream_key", bytes)
"""The key that seals the credentials of upstreams."""
GROUP_KEY = web.AppKey("group_key", bytes)
"""Group hashes are keyed with this value. Workers receive this key; they do not receive the secret of region ids."""
FORGETS = web.AppKey("forgets", list[Callable[[], None]])
"""Called when identities or prices may have changed: each forgets what this process has read of them."""
