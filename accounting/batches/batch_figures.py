"""Counts of batches, chunks and lines by state, for the metrics of the jobs process. The module reads only."""

from __future__ import annotations

import msgspec
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.tables.batch_models import Batch, BatchChunk

BATCH_STATES = ("validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
OPEN_CHUNKS = ("queued", "claimed")


class BatchFigures(msgspec.Struct, frozen=True):
    batches: dict[str, int]
    """The number of batches in each state."""
    chunks: dict[str, int]
    """The number of chunks that are queued or claimed. Chunks that are done are not counted: nobody waits for them."""
    lines: dict[str, int]
    """The lines of queued chunks and of claimed ones, and the lines of all batches that ended well or did not."""
    oldest_queued_s: int
    """The age of the oldest batch that has a queued chunk; 0 without one."""


async def batch_figures(conn: AsyncConnection, now_ms: int) -> BatchFigures:
    """Returns the present counts. O(batches + open chunks)."""
    ended = func.coalesce(func.sum(Batch.num_completed), 0), func.coalesce(func.sum(Batch.num_failed), 0)
    batches, lines = dict.fromkeys(BATCH_STATES, 0), dict.fromkeys((*OPEN_CHUNKS, "completed", "failed"), 0)
    for state, number, completed, failed in await conn.execute(
        select(Batch.state, func.count(), *ended).group_by(Batch.state)
    ):
        batches[state] = number
        lines["completed"] += int(completed)
        lines["failed"] += int(failed)
    chunks = dict.fromkeys(OPEN_CHUNKS, 0)
    open_chunks = (
        select(BatchChunk.state, func.count(), func.sum(BatchChunk.num_lines))
        .join(Batch, Batch.id == BatchChunk.batch_id)
        .where(BatchChunk.state.in_(OPEN_CHUNKS), Batch.state == "in_progress")
        .group_by(BatchChunk.state)
    )
    for state, number, num_lines in await conn.execute(open_chunks):
        chunks[state], lines[state] = number, int(num_lines)
    oldest = await conn.scalar(
        select(func.min(Batch.created_at))
        .join(BatchChunk, BatchChunk.batch_id == Batch.id)
        .where(BatchChunk.state == "queued", Batch.state == "in_progress")
    )
    return BatchFigures(batches, chunks, lines, max(0, now_ms // 1000 - oldest) if oldest else 0)
