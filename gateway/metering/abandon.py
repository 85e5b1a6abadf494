"""Ends requests that only a lost journal knew, because the disk of a gateway slot is gone for good (metering.md 6.4).

Work of the engine without an ending becomes a void and a write-off, counted by the engine's own records. Nobody is
charged, because it cannot be known whether a SETTLE had been durable there. A request whose answer is stored under an
Idempotency-Key ends with the posting that is stored beside it: it is charged if and only if its answer is stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from accounting.database.db import Database
from accounting.limits import limiter_state
from accounting.requests import idempotency_store, request_postings
from accounting.requests.request_postings import Unsettled
from accounting.values import clock
from accounting.values.types import Posting
from gateway.base.redis_link import RedisLink
from gateway.journal.journals import GATEWAY
from gateway.journal.unshipped import OLD_MS, unshipped
from gateway.limiter.limits import limiter_link
from gateway.limiter.redis_keys import open_key
from gateway.metering.metering import metering
from workers.protocol.segments import list_segments


class JournalThere(Exception):
    """The journal exists: it can be replayed, so it must be."""


class NoSuchSlot(Exception):
    """No gateway ever ran in the slot, as far as the books know."""


class Abandoned(msgspec.Struct, frozen=True, kw_only=True):
    slot: str
    voided: int
    charged: int
    """The number of requests that are charged, because their answer is stored."""
    younger: int
    """The number of requests without an ending whose engine records are too young to tell."""


async def abandon(
    database: Database, redis_url: str, slot: int, journals: Mapping[int, Path], directory: Path
) -> Abandoned:
    """Voids the lost requests of a slot. `journals` maps the slots of this machine to their journals. Requests in those
    journals are left to their slots, and so are requests that the limiter holds for others. Raises JournalThere,
    NoSuchSlot, SlotTaken, LimiterUnavailable, OSError, and what SQL raises.
    """
    if await asyncio.to_thread(_is_there, directory):
        raise JournalThere
    await _need_slot(database, slot)
    await _need_redis(redis_url)
    known = await asyncio.to_thread(_requests, journals)
    async with metering(database=database, redis_url=redis_url, slot=slot, directory=directory) as found:
        # The slot's reservations have been given back by now: those that are still held are others'.
        now_ms = clock.now_ms()
        async with database.read() as conn:
            unended = [one for one in await request_postings.unended(conn) if one.request_id not in known]
        held = await _held(found.link, {one.tenant_id for one in unended})
        lost = [one for one in unended if one.request_id not in held]
        due = [one for one in lost if one.posted_at_ms <= now_ms - OLD_MS]
        async with database.read() as conn:
            kept = await idempotency_store.postings(conn, [one.request_id for one in due])
        for one in due:
            await found.journal.end(kept.get(one.request_id) or _void(one, now_ms))
        await found.shipper.caught_up(soon=True)
    return Abandoned(
        slot=f"{GATEWAY}{slot}", voided=len(due) - len(kept), charged=len(kept), younger=len(lost) - len(due)
    )


async def _need_slot(database: Database, slot: int) -> None:
    """Raises NoSuchSlot before anything is changed: to abandon a slot makes it. A gateway is registered while it runs and
    when it was killed; of one that was stopped the books have how far its journal is posted, if anything was."""
    async with database.read() as conn:
        is_registered = slot in await limiter_state.slots(conn)
        if not is_registered and await request_postings.journal_offset(conn, slot) is None:
            raise NoSuchSlot


async def _need_redis(redis_url: str) -> None:
    """Raises LimiterUnavailable before anything is changed: without Redis nobody would notice that the slot runs on
    another host.
    """
    link = limiter_link(redis_url)
    try:
        await link.command("PING")
    finally:
        await link.close()


def _is_there(directory: Path) -> bool:
    return directory.exists() and bool(list_segments(directory))


def _requests(journals: Mapping[int, Path]) -> set[str]:
    return {name for path in journals.values() for name in unshipped(path, 0).requests}


async def _held(link: RedisLink, tenant_ids: Collection[str]) -> set[str]:
    """Returns ids of requests. Raises LimiterUnavailable."""
    found: set[str] = set()
    for tenant_id in sorted(tenant_ids):
        names = await link.command("ZRANGE", open_key(tenant_id), 0, -1)
        found |= {name.decode() for name in names}
    return found


def _void(one: Unsettled, now_ms: int) -> Posting:
    """The key, the model and the price are empty, because only the journal had them."""
    return Posting(
        kind="void",
        request_id=one.request_id,
        outcome="gateway_crash",
        tenant_id=one.tenant_id,
        key_id="",
        model="",
        root=one.root,
        tier="interactive",
        price_version="",
        currency="",
        opened_at_ms=one.posted_at_ms,
        ended_at_ms=now_ms,
        write_off="gateway_crash",
    )
