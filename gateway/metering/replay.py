"""Ends and ships the requests that gateways left in the journals of slots without an owner (metering.md 7).

A slot that is configured does this itself when its gateway starts. Replaying twice is harmless.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from accounting.database.db import Database
from accounting.requests import request_postings
from gateway.journal.journals import GATEWAY
from gateway.journal.unshipped import unshipped
from gateway.metering.metering import metering
from workers.protocol.segments import SlotTaken


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    slot: str
    owned: bool = False
    """A living gateway owns the slot and does this itself: nothing was done."""
    voided: int = 0
    """The number of requests that were running when the gateway died: they cost nothing."""
    shipped: int = 0
    """The number of endings that were on the disk and not in SQL."""


async def replay(database: Database, redis_url: str, slot: int, directory: Path) -> Replayed:
    """Replays a slot. Returns when SQL has all of it. The slot's reservations in Redis are given back too, if Redis
    answers. Raises OSError, and what SQL raises.
    """
    async with database.read() as conn:
        offset = await request_postings.journal_offset(conn, slot) or 0
    left = await asyncio.to_thread(unshipped, directory, offset)
    name = f"{GATEWAY}{slot}"
    try:
        async with metering(database=database, redis_url=redis_url, slot=slot, directory=directory) as found:
            await found.shipper.caught_up(soon=True)
    except SlotTaken:
        return Replayed(slot=name, owned=True)
    return Replayed(slot=name, voided=len(left.running), shipped=len(left.ended))
