"""Sums of the tokens that were written off, by reason."""

from __future__ import annotations

from typing import get_args

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.ledger.legs import COUNTED
from accounting.tables.models import LedgerEntry
from accounting.values.types import WriteOffReason

REASONS: tuple[WriteOffReason, ...] = get_args(WriteOffReason)


async def written_off(conn: AsyncConnection, since_ms: int, until_ms: int) -> dict[str, int]:
    """Returns the tokens of each reason whose write-off was posted in [since, until)."""
    tokens = sum((getattr(LedgerEntry, name) for name in COUNTED[1:]), getattr(LedgerEntry, COUNTED[0]))
    query = (
        select(LedgerEntry.kind, func.sum(tokens))
        .where(LedgerEntry.posted_at_ms >= since_ms, LedgerEntry.posted_at_ms < until_ms)
        .where(LedgerEntry.kind.in_(REASONS))
        .group_by(LedgerEntry.kind)
    )
    return {kind: int(number) for kind, number in await conn.execute(query)}
