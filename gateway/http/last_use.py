"""The time of each key's last use: noted per request, written to SQL from time to time. A crash loses some seconds of
it.
"""

from __future__ import annotations

import time

from aiohttp import web

from accounting.access import api_keys
from accounting.access.api_keys import LAST_USED_GRAIN_S
from accounting.database.db import Database

EVERY_S = 5.0


class LastUse:
    """The last uses that this process has seen."""

    def __init__(self) -> None:
        self._written: dict[str, int] = {}
        self._waiting: dict[str, int] = {}

    def note(self, key_id: str) -> None:
        """Notes a use. This is cheap: there is something to write once a minute and key."""
        now = int(time.time())
        if now - self._written.get(key_id, 0) >= LAST_USED_GRAIN_S:
            self._waiting[key_id] = now

    async def write(self, database: Database) -> None:
        """Writes the noted uses. Raises what SQL raises; nothing is forgotten then."""
        if not self._waiting:
            return
        taken, self._waiting = self._waiting, {}
        try:
            async with database.write() as conn:
                await api_keys.touch(conn, taken)
        except BaseException:
            self._waiting = {**taken, **self._waiting}
            raise
        horizon = int(time.time()) - LAST_USED_GRAIN_S
        recent = {key: at for key, at in self._written.items() if at > horizon}
        self._written = recent | taken


LAST_USE = web.AppKey("last_use", LastUse)
