"""Results of a batch's lines as their owner reads them: one JSON line for each line that has ended, and why lines failed.

The module reads only. While a batch runs its answers lie in SQL, encrypted; once it has ended they lie in its two files.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from sqlalchemy import Row, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database import sealing
from accounting.requests import idempotency_store
from accounting.tables.batch_models import BatchLine

PAGE_LINES = 500


class LineFailures(msgspec.Struct, frozen=True):
    """Lines of a batch that failed in the same way."""

    state: str
    """`errored`, `cancelled` or `expired`."""
    status: int | None
    """The HTTP status of their answers. None stands for lines without an answer."""
    num_lines: int


async def line_page(conn: AsyncConnection, batch_id: str, after: int) -> Sequence[Row[Any]]:
    """Returns at most `PAGE_LINES` rows of lines in input order, ended or not, after line number `after`."""
    query = select(BatchLine.__table__).where(BatchLine.batch_id == batch_id, BatchLine.line_no > after)
    return (await conn.execute(query.order_by(BatchLine.line_no).limit(PAGE_LINES))).all()


async def line_pages(conn: AsyncConnection, batch_id: str) -> AsyncIterator[Sequence[Row[Any]]]:
    """Yields the batch's rows of lines, ended or not, in input order and in pages."""
    after = 0
    while page := await line_page(conn, batch_id, after):
        yield page
        after = page[-1].line_no


async def failures(conn: AsyncConnection, batch_id: str) -> list[LineFailures]:
    """Returns the failed lines, counted by how they failed; the largest number comes first. O(lines of the batch)."""
    how = BatchLine.state, BatchLine.status
    query = (
        select(*how, func.count().label("num_lines"))
        .where(BatchLine.batch_id == batch_id, BatchLine.state.in_(("errored", "cancelled", "expired")))
        .group_by(*how)
    )
    found = [LineFailures(row.state, row.status, row.num_lines) for row in await conn.execute(query)]
    return sorted(found, key=lambda one: (-one.num_lines, one.state, one.status or 0))


def result_line(row: Row[Any], data_key: bytes) -> bytes:
    """Returns the result of a line that has ended, as it stands in the batch's files. Raises `SealBroken`."""
    response = None
    if row.status is not None and row.body is not None:
        place = idempotency_store.line_key(row.batch_id, row.line_no).encode()
        body = msgspec.json.format(sealing.unseal(data_key, row.body, place), indent=-1)
        response = {"status_code": row.status, "request_id": row.request_id, "body": msgspec.Raw(body)}
    result = {
        "id": f"batch_req_{row.batch_id.removeprefix('batch_')}_{row.line_no}",
        "custom_id": row.custom_id,
        "response": response,
        "error": row.error,
    }
    return msgspec.json.encode(result) + b"\n"
