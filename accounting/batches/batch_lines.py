"""Lines of a claimed chunk: started, ended, counted. A line becomes terminal exactly once.

Every write of a runner begins with the renewal of its claim. A runner that has lost the chunk therefore changes no line
of it.

Lines that end get numbers in the order in which they end. The numbers come from the batch's counters and are taken under
the lock of its row, which is held until COMMIT. So whoever sees a number sees all smaller ones, although several runners
write at once; a sequence of the database would not give that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from sqlalchemy import bindparam, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.batches import claims
from accounting.database.db import upsert
from accounting.tables.batch_models import Batch, BatchLine
from accounting.values.types import TOKEN_CLASSES, Usage

Ended = Literal["succeeded", "errored", "cancelled", "expired"]


class LineState(msgspec.Struct, frozen=True):
    state: str
    failures: int = 0
    crashes: int = 0


class LineEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The way a line ended. The caller seals `body`."""

    line_no: int
    custom_id: str | None
    state: Ended
    request_id: str | None = None
    status: int | None = None
    body: bytes | None = None
    error: dict[str, Any] | None = None
    usage: Usage = Usage()


async def line_states(conn: AsyncConnection, held: claims.ChunkClaim) -> dict[int, LineState]:
    """Returns the lines of the chunk that were ever started."""
    query = select(BatchLine.line_no, BatchLine.state, BatchLine.failures, BatchLine.crashes).where(
        BatchLine.batch_id == held.batch_id, BatchLine.chunk_seq == held.seq
    )
    return {row.line_no: LineState(row.state, row.failures, row.crashes) for row in await conn.execute(query)}


async def start_lines(
    conn: AsyncConnection, held: claims.ChunkClaim, lines: Sequence[tuple[int, str]], now: int, lasts_ms: int
) -> None:
    """Notes (line_no, custom_id) pairs that are about to be sent. Raises `ClaimLost`."""
    await claims.renew(conn, held, now, lasts_ms)
    rows = [
        {"batch_id": held.batch_id, "line_no": no, "chunk_seq": held.seq, "custom_id": custom_id}
        for no, custom_id in lines
    ]
    if rows:
        statement = upsert(conn, BatchLine.__table__).values(rows)
        await conn.execute(statement.on_conflict_do_nothing())


async def note_failures(conn: AsyncConnection, held: claims.ChunkClaim, failures: Mapping[int, int]) -> None:
    """Stores the failures of each line, so that the next claimer does not count from 0 again."""
    for line_no, num in sorted(failures.items()):
        await conn.execute(
            update(BatchLine)
            .where(BatchLine.batch_id == held.batch_id, BatchLine.line_no == line_no)
            .values(failures=num)
        )


async def finish_lines(
    conn: AsyncConnection, held: claims.ChunkClaim, ends: Sequence[LineEnd], now: int, lasts_ms: int
) -> None:
    """Writes terminal rows and the batch's counters in one transaction. Raises `ClaimLost`."""
    await claims.renew(conn, held, now, lasts_ms)
    won = await end_lines(conn, held.batch_id, ends)
    if any(end.state == "succeeded" for end in won):
        await conn.execute(update(Batch).where(Batch.id == held.batch_id).values(paused_reason=None))


async def end_lines(conn: AsyncConnection, batch_id: str, ends: Sequence[LineEnd]) -> list[LineEnd]:
    """Makes started lines terminal and leaves lines alone that are terminal already. Returns the lines that were
    changed."""
    mine = {end.line_no: end for end in ends}
    # Lines are locked before their batch, as where the key of a line is taken.
    started = select(BatchLine.line_no).where(
        BatchLine.batch_id == batch_id, BatchLine.line_no.in_(mine), BatchLine.state == "started"
    )
    found = await conn.execute(started.order_by(BatchLine.line_no).with_for_update())
    won = [mine[line_no] for line_no in found.scalars()]
    if won:
        first_no = await _count(conn, batch_id, won)
        rows = [{"_no": end.line_no, **_ending(end, ended_no)} for ended_no, end in enumerate(won, first_no)]
        row = BatchLine.batch_id == batch_id, BatchLine.line_no == bindparam("_no")
        await conn.execute(update(BatchLine).where(*row), rows)
    return won


async def add_ended_lines(conn: AsyncConnection, batch_id: str, ends: Sequence[LineEnd]) -> None:
    """Adds lines that end without having been started: faulty ones, and those that a cancel or the batch's expiry cut
    off."""
    if not ends:
        return
    first_no = await _count(conn, batch_id, ends)
    for start in range(0, len(ends), 500):
        rows = [
            {
                "batch_id": batch_id,
                "line_no": end.line_no,
                "custom_id": end.custom_id,
                **_ending(end, first_no + start + place),
            }
            for place, end in enumerate(ends[start : start + 500])
        ]
        await conn.execute(upsert(conn, BatchLine.__table__).values(rows))


def _ending(end: LineEnd, ended_no: int) -> dict[str, Any]:
    return {
        "state": end.state,
        "ended_no": ended_no,
        "request_id": end.request_id,
        "status": end.status,
        "body": end.body,
        "error": end.error,
        **{name: getattr(end.usage, name) for name in TOKEN_CLASSES},
    }


async def _count(conn: AsyncConnection, batch_id: str, ends: Sequence[LineEnd]) -> int:
    """Adds the lines to the batch's counters, and returns the number of the first of them in the order of endings. The
    batch's row stays locked until the transaction ends."""
    completed = sum(end.state == "succeeded" for end in ends)
    sums = {name: getattr(Batch, name) + sum(getattr(end.usage, name) for end in ends) for name in TOKEN_CLASSES}
    counted = (
        update(Batch)
        .where(Batch.id == batch_id)
        .values(
            num_completed=Batch.num_completed + completed, num_failed=Batch.num_failed + len(ends) - completed, **sums
        )
        .returning(Batch.num_completed + Batch.num_failed)
    )
    num_ended = (await conn.execute(counted)).scalar_one()
    return int(num_ended) - len(ends) + 1
