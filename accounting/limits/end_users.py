"""Recent use of end users with limits. The ledger does not know end users, so this is stored separately, for a day,
under digests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import delete
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database.db import insert_new
from accounting.tables.limiter_models import EndUserUse
from accounting.values.types import Posting

DAY_BUCKET_MS = 1_440_000
DAY_MS = 61 * DAY_BUCKET_MS
"""The time for which use is kept: a limit per day counts 60 buckets and the current one."""


async def note(conn: AsyncConnection, new: Sequence[Posting]) -> None:
    """Stores the use of end users, in the transaction that posts these endings for the first time."""
    rows = [_row(ending) for ending in new if ending.end_user]
    await insert_new(conn, EndUserUse.__table__, rows, (EndUserUse.request_id,))


async def forget(conn: AsyncConnection, now_ms: int) -> None:
    """Deletes the use that no window counts any more."""
    await conn.execute(delete(EndUserUse).where(EndUserUse.opened_at_ms < now_ms - DAY_MS))


def _row(ending: Posting) -> dict[str, Any]:
    usage = ending.usage
    return {
        "request_id": ending.request_id,
        "tenant_id": ending.tenant_id,
        "place": ending.end_user,
        "opened_at_ms": ending.opened_at_ms,
        "ended_at_ms": ending.ended_at_ms,
        "input": usage.cache_write + usage.uncached,
        "output": usage.output,
    }
