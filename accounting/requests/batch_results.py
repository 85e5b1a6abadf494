"""Results of a batch's lines as their owner reads them: one JSON line for each line that has ended, and why lines failed.

The module reads only. While a batch runs its answers lie in SQL, encrypted; once it has ended they lie in its two files.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from sqlalchemy import Row, func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database import sealing
from accounting.requests import idempotency_store
from accounting.tables.batch_models import BatchLine

PAGE_LINES = 500
PAGE_BYTES = 8 * 1024 * 1024
"""The most bytes of answers in one page. An answer that is larger is alone in its page."""


class LineFailures(msgspec.Struct, frozen=True):
    """Lines of a batch that failed in the same way."""

    state: str
    """`errored`, `cancelled` or `expired`."""
    status: int | None
    """The HTTP status of their answers. None stands for lines without an answer."""
    error_code: str | None
    num_lines: int


async def line_page(conn: AsyncConnection, batch_id: str, after: int) -> Sequence[Row[Any]]:
    """Returns rows of lines in input order, ended or not, after line number `after`: at most `PAGE_LINES` of them and at
    most `PAGE_BYTES` of answers, and one row at least where one is left."""
    num_bytes = func.coalesce(func.length(BatchLine.body), 0).label("num_bytes")
    head = (
        select(BatchLine.line_no, num_bytes)
        .where(BatchLine.batch_id == batch_id, BatchLine.line_no > after)
        .order_by(BatchLine.line_no)
        .limit(PAGE_LINES)
        .subquery()
    )
    up_to = func.sum(head.c.num_bytes).over(order_by=head.c.line_no).label("up_to")
    sums = select(head.c.line_no, head.c.num_bytes, up_to).subquery()
    query = (
        select(BatchLine.__table__)
        .join(sums, sums.c.line_no == BatchLine.line_no)
        .where(BatchLine.batch_id == batch_id)
        .where(or_(sums.c.up_to <= PAGE_BYTES, sums.c.up_to == sums.c.num_bytes))
    )
    return (await conn.execute(query.order_by(BatchLine.line_no))).all()


async def line_pages(conn: AsyncConnection, batch_id: str) -> AsyncIterator[Sequence[Row[Any]]]:
    """Yields the batch's rows of lines, ended or not, in input order and in pages."""
    after = 0
    while page := await line_page(conn, batch_id, after):
        yield page
        after = page[-1].line_no


async def known_lines(conn: AsyncConnection, batch_id: str) -> Sequence[Row[int, str, str | None]]:
    """Returns number, state and `custom_id` of every line that was started or has ended, in input order, without the
    answers."""
    query = select(BatchLine.line_no, BatchLine.state, BatchLine.custom_id).where(BatchLine.batch_id == batch_id)
    return (await conn.execute(query.order_by(BatchLine.line_no))).all()


async def failures(conn: AsyncConnection, batch_id: str) -> list[LineFailures]:
    """Returns the failed lines, counted by how they failed; the largest number comes first. O(lines of the batch)."""
    code = BatchLine.error["code"].as_string().label("error_code")
    failed = BatchLine.batch_id == batch_id, BatchLine.state.in_(("errored", "cancelled", "expired"))
    how = select(BatchLine.state, BatchLine.status, code).where(*failed).subquery().c
    query = select(*how, func.count().label("num_lines")).group_by(*how)
    found = [LineFailures(row.state, row.status, row.error_code, row.num_lines) for row in await conn.execute(query)]
    return sorted(found, key=lambda one: (-one.num_lines, one.state, one.status or 0, one.error_code or ""))


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
