"""Equation I14: the records that a gateway slot's journal shipped are in the ledger, as they were written. It only
reads.

Segments are kept for a week after they were shipped, so the check covers that time. An ending that lost to another
ending of its request, or to another request of its batch line, bills nothing and is no failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.books import equations
from accounting.books.equations import EquationResult
from accounting.requests import request_postings
from accounting.values.types import LedgerRow, Posting
from gateway.journal import journal_records
from gateway.journal.unshipped import scans
from workers.protocol.journal import Kind
from workers.protocol.segments import list_segments

AT_ONCE = 500


async def shipped_whole(conn: AsyncConnection, journals: Mapping[int, Path]) -> EquationResult:
    num_checked = 0
    failures: list[str] = []
    for slot, directory in sorted(journals.items()):
        offset = await request_postings.journal_offset(conn, slot) or 0
        segments = await asyncio.to_thread(list_segments, directory)
        last_seq = 0
        for segment in segments:
            shipped, last, is_damaged = await asyncio.to_thread(_shipped_of, segment.path, offset)
            if is_damaged:
                failures.append(f"slot {slot}: {segment.path.name} is damaged")
            last_seq = max(last_seq, last)
            for start in range(0, len(shipped), AT_ONCE):
                failures += await _missing(conn, shipped[start : start + AT_ONCE])
            num_checked += len(shipped)
        if segments and offset > last_seq:
            failures.append(f"slot {slot}: {offset} was shipped, {last_seq} is the journal's last")
    return EquationResult(equations.JOURNAL_SHIPPED_WHOLE, num_checked, tuple(failures))


def _shipped_of(path: Path, offset: int) -> tuple[list[Posting], int, bool]:
    """Returns the segment's endings up to the offset, the number of its last record, and whether it is damaged."""
    shipped: list[Posting] = []
    last_seq, is_damaged = 0, False
    for found in scans(path):
        for record in found.records:
            last_seq = record.seq
            if record.kind in (Kind.SETTLE, Kind.VOID) and record.seq <= offset:
                shipped.append(journal_records.posting(record.payload))
        is_damaged = not found.records and found.state == "corrupt"
    return shipped, last_seq, is_damaged


async def _missing(conn: AsyncConnection, shipped: Sequence[Posting]) -> list[str]:
    booked = await request_postings.endings(conn, [posting.request_id for posting in shipped])
    wrong = []
    for posting in shipped:
        row = booked.get(posting.request_id)
        if row is None or (row["kind"] == posting.kind and not _same(posting, row)):
            wrong.append(posting.request_id)
    return wrong


def _same(posting: Posting, row: LedgerRow) -> bool:
    usage, charge = posting.usage, posting.charge
    return (row["charge"], row["output"], row["cache_read"], row["cache_write"], row["uncached"]) == (
        charge.total,
        usage.output,
        usage.cache_read,
        usage.cache_write,
        usage.uncached,
    )
