"""Attempts whose client left before the first byte, and the charges of those that an SDK then repeated.

An SDK repeats a request by itself if it got no answer, and it sends no key that says so. The logical request is charged
once: when the repeat is settled, the earlier charge is moved to the write-off `sdk_retry`. The module knows a hash of
the request, but no content.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from sqlalchemy import delete, func, or_, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database.db import among, upsert
from accounting.requests import label_usage, request_postings
from accounting.tables.idempotency_models import TO_MOVE
from accounting.tables.idempotency_models import UnheardAttempt as Attempt
from accounting.tables.models import ApiKey, LedgerEntry

WITHIN_MS = 120_000
"""The most milliseconds between the end of an attempt and its repeat."""
MAX_MOVED = 2
"""The most replaced attempts of one fingerprint in a day, as SDKs repeat twice."""
MAX_MOVED_OF_KEY = 60
"""The most engine requests of one key that are replaced within an hour. A body that differs each time has a new
fingerprint each time, and a charge that is taken back was computed: without a bound a tenant could use three times what
it pays for. One a minute is what a bad network does to a busy client; attempts beyond the bound are charged."""
HOUR_MS = 3_600_000
DAY_MS = 86_400_000
MAX_AT_ONCE = 500


class DisconnectedEarly(msgspec.Struct, frozen=True):
    request_id: str
    attempt_id: str
    """The HTTP request: with several prompts it is one attempt."""
    tenant_id: str
    key_id: str
    fingerprint: bytes
    ended_at_ms: int


async def note(conn: AsyncConnection, unheard: Sequence[DisconnectedEarly]) -> None:
    rows = [msgspec.structs.asdict(one) for one in unheard]
    if rows:
        await conn.execute(upsert(conn, Attempt.__table__).on_conflict_do_nothing(), rows)


async def replace(conn: AsyncConnection, key_id: str, fingerprint: bytes, retry_id: str, started_at_ms: int) -> int:
    """Notes that a settled repeat replaces the attempts before it. Returns how many engine requests are no longer
    charged."""
    query = select(Attempt.__table__).where(
        Attempt.key_id == key_id, Attempt.fingerprint == fingerprint, Attempt.attempt_id != retry_id
    )
    # All who lock attempts do so in the order of their ids.
    locked = await conn.execute(query.order_by(Attempt.request_id).with_for_update())
    rows = sorted(locked, key=lambda row: row.ended_at_ms)
    replaced = {row.attempt_id for row in rows if row.replaced_by is not None}
    waiting = [
        row.attempt_id for row in rows if row.replaced_by is None and row.ended_at_ms >= started_at_ms - WITHIN_MS
    ]
    chosen = list(dict.fromkeys(waiting))[: max(0, MAX_MOVED - len(replaced))]
    if not chosen or await _num_moved(conn, key_id, started_at_ms) >= MAX_MOVED_OF_KEY:
        return 0
    done = await conn.execute(update(Attempt).where(Attempt.attempt_id.in_(chosen)).values(replaced_by=retry_id))
    return done.rowcount


async def _num_moved(conn: AsyncConnection, key_id: str, now_ms: int) -> int:
    """Returns the key's replaced engine requests in the hour before `now_ms`. The caller holds a lock on the key until
    it commits."""
    await conn.execute(select(ApiKey.id).where(ApiKey.id == key_id).with_for_update(key_share=True))
    recent = Attempt.replaced_by.is_not(None) & (Attempt.ended_at_ms > now_ms - HOUR_MS)
    query = select(func.count()).where(Attempt.key_id == key_id, recent)
    return int(await conn.scalar(query) or 0)


async def move(conn: AsyncConnection) -> list[str]:
    """Moves the charges of replaced attempts if their own settle and that of the repeat are in the ledger by now.
    Returns the moved ones. An attempt that an operator has corrected by hand is left as it is, and not looked at
    again."""
    found = await conn.execute(select(Attempt.request_id, Attempt.replaced_by).where(text(TO_MOVE)))
    pairs = [(row.request_id, row.replaced_by) for row in found]
    of_pairs = among(conn, LedgerEntry.request_id, {request_id for pair in pairs for request_id in pair})
    settles = await conn.scalars(select(LedgerEntry.request_id).where(of_pairs, LedgerEntry.kind == "settle"))
    settled = frozenset(settles)
    request_ids = [own for own, repeat in pairs if own in settled and repeat in settled][:MAX_AT_ONCE]
    if not request_ids:
        return []
    chosen = select(Attempt.request_id).where(among(conn, Attempt.request_id, request_ids))
    await conn.execute(chosen.order_by(Attempt.request_id).with_for_update())
    moved = await request_postings.reverse(conn, request_ids, "sdk_retry")
    await conn.execute(update(Attempt).where(Attempt.request_id.in_(request_ids)).values(is_moved=True))
    # The first engine request of an attempt has the id of its row in the request log, where all of them are together.
    await label_usage.take_back(conn, moved)
    return moved


async def any_to_move(conn: AsyncConnection) -> bool:
    return (await conn.execute(select(Attempt.request_id).where(text(TO_MOVE)).limit(1))).first() is not None


async def forget(conn: AsyncConnection, now_ms: int) -> None:
    """Deletes attempts that nobody repeated in time. Those that were repeated are counted for a day and deleted
    then."""
    late = Attempt.ended_at_ms < now_ms - 10 * WITHIN_MS
    await conn.execute(
        delete(Attempt).where(or_(late & Attempt.replaced_by.is_(None), Attempt.ended_at_ms < now_ms - DAY_MS))
    )
