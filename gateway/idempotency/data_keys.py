"""Tenants' data keys in this process: unwrapped once, kept for a while. This module does not know what they encrypt."""

from __future__ import annotations

import time
from collections import OrderedDict

from aiohttp import web

from accounting.database import sealing
from accounting.database.db import Database
from accounting.values.errors import NotFoundError
from gateway.base import errors

KEPT = 1_000
FRESH_S = 60.0
"""The time after which an erased tenant's key is forgotten."""


class DataKeys:
    def __init__(self, database: Database, master: bytes) -> None:
        self._database = database
        self._master = master
        self._keys: OrderedDict[str, tuple[float, bytes]] = OrderedDict()

    async def key(self, tenant_id: str) -> bytes:
        """Returns a tenant's data key. Raises what SQL raises, and `ApiError` 404 for a tenant that was erased meanwhile."""
        known = self._keys.get(tenant_id)
        if known is not None and time.monotonic() - known[0] < FRESH_S:
            return known[1]
        try:
            async with self._database.write() as conn:
                key = await sealing.data_key(conn, self._master, tenant_id, int(time.time()))
        except NotFoundError:
            raise errors.not_found() from None
        self._keys[tenant_id] = (time.monotonic(), key)
        self._keys.move_to_end(tenant_id)
        if len(self._keys) > KEPT:
            self._keys.popitem(last=False)
        return key


DATA_KEYS = web.AppKey("seals", DataKeys)
