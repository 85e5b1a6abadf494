"""Says which home's gateway runs in a slot. The lock on the journal keeps apart the processes of one machine, and this
those of several machines.

A home has an id for each of its slots, in a file beside the journal. While a gateway runs, Redis has its id. A backup
leaves the file out, so that a restored home is another one; who moves a slot's folder to another host takes the id along.
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from pathlib import Path

from gateway.base.redis_link import LimiterUnavailable, RedisLink
from gateway.limiter.redis_keys import running_key
from workers.protocol.segments import SlotTaken

KEPT_S = 10
"""The time for which Redis keeps the id of a gateway that has been killed."""
_FILE = "owner"
_ID_BYTES = 16


class SlotOwner:
    """This home as the owner of a slot."""

    def __init__(self, link: RedisLink, slot: int, directory: Path) -> None:
        """`directory` has the slot's journal."""
        self.key = running_key(slot)
        self.id = b""
        self._link = link
        self._path = directory / _FILE

    async def refuse_others(self) -> None:
        """Reads or draws the id. Raises `SlotTaken` if another home's gateway runs in the slot, as far as Redis says so.
        Nothing is written, so that who is refused leaves nothing.
        """
        self.id = await asyncio.to_thread(self._kept) or secrets.token_hex(_ID_BYTES).encode()
        with suppress(LimiterUnavailable):
            found = await self._link.command("GET", self.key)
            if found not in (None, self.id):
                raise SlotTaken(f"a gateway of another host or home runs in it, or did {KEPT_S} s ago")

    async def begin(self) -> None:
        """Keeps the id, once the journal is locked."""
        await asyncio.to_thread(self._keep)
        with suppress(LimiterUnavailable):
            await self._link.command("SET", self.key, self.id, "EX", KEPT_S)

    async def end(self) -> None:
        """Lets any home have the slot at once."""
        with suppress(LimiterUnavailable):
            if await self._link.command("GET", self.key) == self.id:
                await self._link.command("DEL", self.key)

    def _keep(self) -> None:
        if self._kept() != self.id:
            self._path.write_bytes(self.id)

    def _kept(self) -> bytes:
        found = self._path.read_bytes() if self._path.exists() else b""
        return found if len(found) == 2 * _ID_BYTES else b""
