"""Brings into SQL what the journals of this machine have and SQL lacks (metering.md 7): what gateways left in slots
without an owner, and engine records that SQL had and has lost.

A gateway's slot that is configured does this itself when its gateway starts. Replaying twice is harmless.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import msgspec

from accounting.database.db import Database
from accounting.requests import request_postings
from gateway.journal import engine_records
from gateway.journal.journals import GATEWAY
from gateway.journal.unshipped import unshipped
from gateway.metering.metering import metering
from workers.protocol.segments import SlotTaken


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    slot: str
    owned: bool = False
    """A living process owns the slot. A gateway does this itself, so nothing was done. Of a worker's journal, what still
    runs was left out.
    """
    voided: int = 0
    """The number of requests that were running when the gateway died: they cost nothing."""
    shipped: int = 0
    """The number of endings that were on the disk and not in SQL."""
    brought_back: int = 0
    """The number of engine records of a worker that were on the disk and not in SQL."""
    left_out: int = 0
    """The number of engine records whose requests neither SQL nor a gateway's journal here knows."""


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


async def replay_worker(database: Database, gateways: Mapping[int, Path], worker: str, directory: Path) -> Replayed:
    """Brings back the engine records of a worker's journal. `gateways` has the gateways' journals of this machine, which
    are replayed first. Raises OSError, and what SQL raises.
    """
    kept = await engine_records.post_kept(database, gateways, worker, directory)
    return Replayed(slot=worker, owned=kept.is_owned, brought_back=kept.num_new, left_out=kept.num_left_out)
