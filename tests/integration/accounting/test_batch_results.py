"""Pages of a batch's lines: few where answers are large, and every line once, in order."""

from __future__ import annotations

import asyncio
import random
import uuid

from sqlalchemy import event, insert

from accounting.access import api_keys
from accounting.batches import batch_lines, batches, files
from accounting.batches.batch_lines import LineEnd
from accounting.requests import batch_results
from accounting.requests.batch_results import LineFailures
from accounting.tables.batch_models import BatchLine
from accounting.tenants import tenants


async def batch_of(conn, pepper, sizes: list[int | None]) -> str:
    """A batch whose lines have answers of these sizes; None stands for a line without one."""
    tenant_id = (await tenants.create(conn, uuid.uuid4().hex, now=1)).id
    key = await api_keys.create(conn, pepper, tenant_id=tenant_id, now=1)
    source = await files.create(
        conn, tenant_id, purpose="batch", name="in", num_bytes=1, sha256="0", storage_key="k", now=1
    )
    made = await batches.create(
        conn, tenant_id, key.info.id, input_file_id=source.id, endpoint="/v1/embeddings", completion_window="24h", now=1
    )
    ends = [
        LineEnd(
            line_no=no, custom_id=f"c{no}", state="succeeded", status=200, body=None if size is None else b"x" * size
        )
        for no, size in enumerate(sizes, 1)
    ]
    await batch_lines.add_ended_lines(conn, made.id, ends)
    return made.id


async def numbers(conn, batch_id: str) -> list[list[int]]:
    return [[row.line_no for row in page] async for page in batch_results.line_pages(conn, batch_id)]


async def test_a_page_of_large_answers_has_few_lines_and_every_line_comes_in_order(conn, pepper, monkeypatch):
    monkeypatch.setattr(batch_results, "PAGE_BYTES", 1000)
    batch_id = await batch_of(conn, pepper, [400, None, 600, 1, 5000, 5000, None, 999, 1, None, 0, 1000])
    assert await numbers(conn, batch_id) == [[1, 2, 3], [4], [5], [6], [7, 8, 9, 10, 11], [12]]


async def test_an_answer_beyond_a_page_comes_after_lines_without_one(conn, pepper, monkeypatch):
    monkeypatch.setattr(batch_results, "PAGE_BYTES", 1000)
    batch_id = await batch_of(conn, pepper, [None, 0, 5000, None, 1])
    assert await numbers(conn, batch_id) == [[1, 2, 3], [4, 5]]


async def test_a_page_has_at_most_8_mib_of_answers_and_500_lines(conn, pepper):
    large = await batch_of(conn, pepper, [3 * 1024 * 1024] * 5)
    assert await numbers(conn, large) == [[1, 2], [3, 4], [5]]
    small = await batch_of(conn, pepper, [1] * 1001)
    assert [len(page) for page in await numbers(conn, small)] == [500, 500, 1]


async def test_known_lines_come_without_their_answers(db, pepper):
    async with db.write() as conn:
        batch_id = await batch_of(conn, pepper, [10, None, 20])
    statements: list[str] = []
    async with db.read() as conn:
        event.listen(
            conn.sync_connection, "before_cursor_execute", lambda _c, _u, statement, *_: statements.append(statement)
        )
        rows = await batch_results.known_lines(conn, batch_id)
    assert [(row.line_no, row.state, row.custom_id) for row in rows] == [
        (1, "succeeded", "c1"),
        (2, "succeeded", "c2"),
        (3, "succeeded", "c3"),
    ]
    assert statements
    assert not any("body" in one for one in statements)


async def test_failed_lines_are_counted_by_state_status_and_code(conn, pepper):
    """They were counted by status alone, so that all mistakes in lines were one number."""
    batch_id = await batch_of(conn, pepper, [1])
    ends = [(400, "context_length_exceeded"), (400, "unsupported_parameter"), (400, "context_length_exceeded")]
    failed = [
        LineEnd(line_no=no, custom_id=None, state="errored", status=status, error={"code": code, "message": "no"})
        for no, (status, code) in enumerate(ends, 2)
    ]
    cut = LineEnd(line_no=5, custom_id=None, state="expired", error={"code": "batch_expired", "message": "late"})
    await batch_lines.add_ended_lines(conn, batch_id, [*failed, cut])
    assert await batch_results.failures(conn, batch_id) == [
        LineFailures("errored", 400, "context_length_exceeded", 2),
        LineFailures("errored", 400, "unsupported_parameter", 1),
        LineFailures("expired", None, "batch_expired", 1),
    ]


async def started(db, pepper, num_lines: int) -> str:
    """A batch whose lines are all under way."""
    async with db.write() as conn:
        batch_id = await batch_of(conn, pepper, [])
        rows = [{"batch_id": batch_id, "line_no": no, "custom_id": f"c{no}"} for no in range(1, num_lines + 1)]
        await conn.execute(insert(BatchLine), rows)
    return batch_id


def answered(line_no: int) -> LineEnd:
    return LineEnd(line_no=line_no, custom_id=f"c{line_no}", state="succeeded", status=200, body=b"x")


async def read_on(db, batch_id: str, after_no: int) -> tuple[list[int], int]:
    """The lines that ended after that one, and the place at which a reader goes on."""
    async with db.read() as conn:
        rows = await batch_results.ended_page(conn, batch_id, after_no)
    return [row.line_no for row in rows], rows[-1].ended_no if rows else after_no


async def test_a_line_whose_transaction_commits_late_is_not_skipped(db, pepper):
    """A sequence of the database gives the earlier number to the transaction that ends later: a reader goes past it."""
    batch_id = await started(db, pepper, 2)

    async def end_second() -> None:
        async with db.write() as conn:
            await batch_lines.end_lines(conn, batch_id, [answered(2)])

    async with db.write() as conn:
        await batch_lines.end_lines(conn, batch_id, [answered(1)])
        second = asyncio.create_task(end_second())
        await asyncio.sleep(0.2)
        first_page, after_no = await read_on(db, batch_id, 0)
    await second
    second_page, _ = await read_on(db, batch_id, after_no)
    assert first_page + second_page == [1, 2]


async def test_readers_get_every_line_once_while_several_runners_end_lines(db, pepper, monkeypatch):
    monkeypatch.setattr(batch_results, "PAGE_LINES", 7)
    chance = random.Random(5)
    numbers_left = list(range(1, 101))
    batch_id = await started(db, pepper, len(numbers_left))
    chance.shuffle(numbers_left)

    async def run() -> None:
        while numbers_left:
            mine = [answered(numbers_left.pop()) for _ in range(min(len(numbers_left), chance.randint(1, 4)))]
            async with db.write() as conn:
                await batch_lines.end_lines(conn, batch_id, mine)
                await asyncio.sleep(chance.random() / 200)

    async def follow() -> list[int]:
        seen: list[int] = []
        after_no = 0
        async with asyncio.timeout(30):
            while len(seen) < 100:
                found, after_no = await read_on(db, batch_id, after_no)
                seen += found
                await asyncio.sleep(0.002)
        return seen

    first, second, *_ = await asyncio.gather(follow(), follow(), *(run() for _ in range(4)))
    assert first == second
    assert sorted(first) == list(range(1, 101))
    async with db.read() as conn:
        rows = (await conn.execute(BatchLine.__table__.select().order_by(BatchLine.ended_no))).all()
    assert [(row.ended_no, row.line_no) for row in rows] == list(enumerate(first, 1))


async def test_lines_that_got_no_number_come_after_all_others_once_the_batch_has_ended(conn, pepper):
    """A jobs process from before the numbers may have ended them."""
    batch_id = await batch_of(conn, pepper, [1, 2, 3, 4])
    await conn.exec_driver_sql(f"UPDATE batch SET num_total = 4, state = 'completed' WHERE id = '{batch_id}'")
    await conn.exec_driver_sql(f"UPDATE batch_line SET ended_no = NULL WHERE batch_id = '{batch_id}' AND line_no < 3")
    batch = await batches.get(conn, None, batch_id)
    found = await batch_results.filed_lines(conn, batch, 0)
    assert [(one.line_no, one.num_before) for one in found] == [(3, 2), (4, 3), (1, 0), (2, 1)]
    places = [await batch_results.ended_no(conn, batch, batch_results.line_id(batch_id, no)) for no in (4, 1)]
    assert [[one.line_no for one in await batch_results.filed_lines(conn, batch, place)] for place in places] == [
        [1, 2],
        [2],
    ]
