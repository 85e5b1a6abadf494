"""The whole of `verify-books`, for the command and for the route: the ledger's equations, and its journals against it.

It only reads. Requests that still run, or whose journal is not shipped yet, are left out; their slots are named. So are
requests whose ending came to SQL just now, before the engine's record of them, and where another machine has gateways,
requests without an ending that an engine recorded lately: only a journal there knows whether they run.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec

from accounting.books import books
from accounting.books.equations import DOCUMENTED_IN, BooksReport
from accounting.database.db import Database
from accounting.ledger.write_off_sums import by_reason, written_off
from accounting.limits.limiter_books import CLOCKS_APART_MS
from accounting.requests import request_postings
from accounting.values import clock
from accounting.values.progress import Told, nobody
from gateway.base.redis_link import RedisLink
from gateway.books.limiter_truth import limiter_equals_books
from gateway.journal.journal_truth import shipped_whole
from gateway.journal.journals import gateway_journals
from gateway.journal.unshipped import OLD_MS, unshipped

FOR_EVER_MS = 2**62
RECORD_LATE_MS = 2_000 + CLOCKS_APART_MS
"""How long an engine record may come after its ending, by clocks of two machines. It is many times the pause in which a
worker gathers records (`RECORDS_EVERY_S` in `gateway/routing/links/worker_records.py`).
"""


class Verified(msgspec.Struct, frozen=True):
    report: BooksReport
    unreplayed: tuple[int, ...]
    """Gateway slots with requests that are not in SQL yet."""
    written_off: dict[str, int]
    """The tokens that nobody paid for, by reason, over the whole ledger."""

    def shape(self) -> dict[str, Any]:
        return {
            "ok": self.report.ok,
            "as_of": int(time.time()),
            "equations": [
                {
                    "id": e.id,
                    "name": e.name,
                    "meaning": e.equation.meaning,
                    "documented_in": DOCUMENTED_IN,
                    "ok": e.ok,
                    "num_checked": e.num_checked,
                    "failures": e.failures,
                }
                for e in self.report.equations
            ],
            "unreplayed": self.unreplayed,
            "written_off_tokens": self.written_off,
        }


async def verify(database: Database, state_dir: Path, link: RedisLink, told: Told = nobody) -> Verified:
    """Verifies the books. `state_dir` holds the journals of every gateway slot of this machine. Raises SQLAlchemyError,
    OSError.
    """
    journals = gateway_journals(state_dir)
    # The journals are read before the snapshot. If they were read after it, requests shipped in between would be
    # missed.
    left = {
        slot: await asyncio.to_thread(unshipped, path, await _offset(database, slot)) for slot, path in journals.items()
    }
    running = frozenset().union(*(slot.requests for slot in left.values()))
    async with database.read() as conn:
        now_ms = clock.now_ms()
        late = await request_postings.unwitnessed(conn, now_ms - RECORD_LATE_MS)
        late |= await request_postings.half_witnessed(conn, now_ms - request_postings.LOST_RECORD_MS, FOR_EVER_MS)
        away = {place.slot for place in await request_postings.journal_offsets(conn)} - journals.keys()
        young_ms = now_ms - OLD_MS
        unended = await request_postings.unended(conn) if away else []
        young = {one.request_id for one in unended if one.posted_at_ms > young_ms} - running
        report = await books.verify(conn, running=running | late | young, told=told)
        shipped = await shipped_whole(conn, journals)
        lost = by_reason(await written_off(conn, 0, FOR_EVER_MS))
    limited = await limiter_equals_books(database, link, journals)
    slots = {slot for slot, found in left.items() if found.requests} | (away if young else set())
    return Verified(BooksReport((*report.equations, limited, shipped)), tuple(sorted(slots)), lost)


async def _offset(database: Database, slot: int) -> int:
    async with database.read() as conn:
        return await request_postings.journal_offset(conn, slot) or 0
