"""Results of a batch's lines as their owner reads them: one JSON line for each line that has ended, and why lines failed.

The module reads only. While a batch runs its answers lie in SQL, encrypted; once it has ended they lie in its two files.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import ColumnElement, Row, func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import InstrumentedAttribute

from accounting.batches.batches import BatchInfo
from accounting.database import sealing
from accounting.requests import idempotency_store
from accounting.tables.batch_models import BatchLine

PAGE_LINES = 500
PAGE_BYTES = 8 * 1024 * 1024
"""The most bytes of answers in one page. An answer that is larger is alone in its page."""
_LINE_ID = re.compile(r"batch_req_(?P<batch>[0-9a-zA-Z]+)_(?P<line>[0-9]{1,9})", re.ASCII)


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
    return await _page(conn, batch_id, BatchLine.line_no, after)


async def ended_page(conn: AsyncConnection, batch_id: str, after_no: int) -> Sequence[Row[Any]]:
    """Returns rows of lines that have ended, in the order in which they ended, after the one whose `ended_no` is
    `after_no`, as many as `line_page`. No later page has a line that belongs before one of these."""
    return await _page(conn, batch_id, BatchLine.ended_no, after_no)


async def _page(
    conn: AsyncConnection, batch_id: str, number: InstrumentedAttribute[Any], after: int
) -> Sequence[Row[Any]]:
    """Returns a page of the lines with a number above `after`, in the order of these numbers."""
    num_bytes = func.coalesce(func.length(BatchLine.body), 0).label("num_bytes")
    head = (
        select(number.label("number"), num_bytes)
        .where(BatchLine.batch_id == batch_id, number > after)
        .order_by(number)
        .limit(PAGE_LINES)
        .subquery()
    )
    up_to = func.sum(head.c.num_bytes).over(order_by=head.c.number).label("up_to")
    sums = select(head.c.number, head.c.num_bytes, up_to).subquery()
    query = (
        select(BatchLine.__table__)
        .join(sums, sums.c.number == number)
        .where(BatchLine.batch_id == batch_id)
        .where(or_(sums.c.up_to <= PAGE_BYTES, sums.c.up_to == sums.c.num_bytes))
    )
    return (await conn.execute(query.order_by(number))).all()


async def line_pages(conn: AsyncConnection, batch_id: str) -> AsyncIterator[Sequence[Row[Any]]]:
    """Yields the batch's rows of lines, ended or not, in input order and in pages."""
    after = 0
    while page := await line_page(conn, batch_id, after):
        yield page
        after = page[-1].line_no


class FiledLine(NamedTuple):
    """The place of a line in the two files of a batch that has ended."""

    ended_no: int
    line_no: int
    is_output: bool
    num_before: int
    """The number of lines that stand before it in its file."""


async def has_filed_line(conn: AsyncConnection, batch: BatchInfo, after_no: int) -> bool:
    """Returns whether a batch that has ended has a line whose `ended_no` is above `after_no`."""
    left = select(BatchLine.line_no).where(BatchLine.batch_id == batch.id, _ended_no(batch) > after_no).limit(1)
    return (await conn.execute(left)).first() is not None


async def filed_lines(conn: AsyncConnection, batch: BatchInfo, after_no: int) -> list[FiledLine]:
    """Returns the lines of a batch that has ended whose `ended_no` is above `after_no`, in the order in which they
    ended. O(lines of the batch)."""
    number = _ended_no(batch)
    mine = BatchLine.batch_id == batch.id
    query = select(BatchLine.line_no, BatchLine.state, number.label("ended_no")).where(mine).order_by(BatchLine.line_no)
    found, num_in = [], [0, 0]  # the numbers of lines in the file of errors, and in that of answers
    for line_no, state, ended_no in await conn.execute(query):
        is_output = state == "succeeded"
        if ended_no > after_no:
            found.append(FiledLine(ended_no, line_no, is_output, num_in[is_output]))
        num_in[is_output] += 1
    return sorted(found)


async def ended_no(conn: AsyncConnection, batch: BatchInfo, line_id: str) -> int | None:
    """Returns the place of a line, named by the id of its result, among those of the batch that have ended. None stands
    for a line that has not ended, and for the id of none."""
    match = _LINE_ID.fullmatch(line_id)
    if match is None or match["batch"] != batch.id.removeprefix("batch_"):
        return None
    query = select(_ended_no(batch)).where(
        BatchLine.batch_id == batch.id, BatchLine.line_no == int(match["line"]), BatchLine.state != "started"
    )
    place = await conn.scalar(query)
    return None if place is None else int(place)


def _ended_no(batch: BatchInfo) -> ColumnElement[int]:
    """Returns the place of an ended line. Those that got none come after all others, in input order."""
    return func.coalesce(BatchLine.ended_no, batch.num_total + BatchLine.line_no)


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


def line_id(batch_id: str, line_no: int) -> str:
    """Returns the id of a line's result. It is also where a reader of the results goes on."""
    return f"batch_req_{batch_id.removeprefix('batch_')}_{line_no}"


def result_line(row: Row[Any], data_key: bytes) -> bytes:
    """Returns the result of a line that has ended, as it stands in the batch's files. Raises `SealBroken`."""
    response = None
    if row.status is not None and row.body is not None:
        place = idempotency_store.line_key(row.batch_id, row.line_no).encode()
        body = msgspec.json.format(sealing.unseal(data_key, row.body, place), indent=-1)
        response = {"status_code": row.status, "request_id": row.request_id, "body": msgspec.Raw(body)}
    result = {
        "id": line_id(row.batch_id, row.line_no),
        "custom_id": row.custom_id,
        "response": response,
        "error": row.error,
    }
    return msgspec.json.encode(result) + b"\n"
