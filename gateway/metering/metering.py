"""Assembles the billing path of one gateway process, in the order in which its parts must start and stop.

Start: offset from SQL → no other host has the slot → journal (replays what a dead process left) → shipper → limiter →
admission may accept.

Stop: endings written → upkeep ended → journal sealed → shipped → slot free → limiter's link closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from aiohttp import web

from accounting.database.db import Database
from accounting.requests import idempotency_store, request_postings
from accounting.values.types import Posting
from gateway.base.redis_link import TIMEOUT_S, RedisLink
from gateway.journal.journal import Journal, open_journal
from gateway.journal.poster import Poster, Posts
from gateway.journal.poster_process import PosterProcess
from gateway.journal.shipper import Shipper
from gateway.limiter.limits import Limiter, limiter_link
from gateway.limiter.upkeep import Upkeep
from gateway.metering.admission import Admission
from gateway.metering.metering_metrics import MeteringMetrics
from gateway.metering.price_cache import PriceCache
from gateway.metering.slot_owner import SlotOwner
from workers.process.rounds import repeat, restarted

log = logging.getLogger(__name__)

REVIVE_EVERY_S = 1.0


@dataclass(frozen=True)
class Metering:
    admission: Admission
    shipper: Shipper
    poster: Posts
    journal: Journal
    limiter: Limiter
    link: RedisLink
    prices: PriceCache
    owner: SlotOwner


@asynccontextmanager
async def metering(
    *,
    database: Database,
    redis_url: str,
    slot: int,
    directory: Path,
    limiter_timeout_s: float = TIMEOUT_S,
    metrics: MeteringMetrics | None = None,
    shipped: Callable[[int], None] = lambda _: None,
    prices: PriceCache | None = None,
) -> AsyncIterator[Metering]:
    """Runs the billing path. `directory` holds this slot's journal; `shipped` is explained at `Shipper`. `prices`
    are given by a process that hears of changes. Raises SlotTaken if another process has it, here or on another host,
    and what SQL raises.
    """
    metrics = metrics or MeteringMetrics()
    async with database.read() as conn:
        offset = await request_postings.journal_offset(conn, slot) or 0

    async def stored(request_ids: Collection[str]) -> Mapping[str, Posting]:
        async with database.read() as conn:
            return await idempotency_store.postings(conn, request_ids)

    link = limiter_link(redis_url, timeout_s=limiter_timeout_s, script_ran=metrics.script_ran)
    owner = SlotOwner(link, slot, directory)
    try:
        await owner.refuse_others()
        journal = await open_journal(
            directory, slot, min_next_seq=offset + 1, stored=stored, committed=metrics.committed
        )
    except BaseException:
        await link.close()
        raise
    await owner.begin()
    async with database.write() as conn:
        # The journal is replayed: the requests that the dead process left running have ended now, and their keys may be
        # used again.
        await idempotency_store.drop_running(conn, slot)
    poster = _poster(database, directory, slot, offset)
    shipper = Shipper(journal, poster, shipped=shipped)
    limiter = Limiter(link, slot, database, caught_up=partial(shipper.caught_up, soon=True))
    upkeep = Upkeep(limiter, link, database)
    prices = prices or PriceCache(database)
    admission = Admission(
        journal=journal, limiter=limiter, prices=prices, database=database, backlog=shipper, metrics=metrics
    )
    metrics.watch(limiter, link, journal, shipper)
    await shipper.start()
    await upkeep.start()
    reviver = asyncio.create_task(restarted(_revive, journal))
    try:
        yield Metering(admission, shipper, poster, journal, limiter, link, prices, owner)
    finally:
        await admission.drain()
        reviver.cancel()
        await asyncio.gather(reviver, return_exceptions=True)
        await prices.close()
        await upkeep.close()
        await journal.close()
        await shipper.close()
        await poster.close()
        await owner.end()
        await link.close()


def _poster(database: Database, directory: Path, slot: int, offset: int) -> Posts:
    """Returns the poster, which is a separate process for a database server.

    SQLite's writers take turns best within one process.
    """
    if database.dialect == "sqlite":
        return Poster(directory, database, slot, offset)
    return PosterProcess(directory, database.url, slot, offset)


async def _revive(journal: Journal) -> None:
    """Revives the journal in a new segment after a full or failing disk."""
    await repeat(REVIVE_EVERY_S, journal.revive, forgives=(Exception,), on_failure=_not_revived, waits_first=True)


def _not_revived(failure: Exception) -> None:
    log.error("the journal is not revived yet: %s", failure)


METERING = web.AppKey("metering", Metering)
