"""Pages of a batch's lines: few where answers are large, and every line once, in order."""

from __future__ import annotations

import uuid

from sqlalchemy import event

from accounting.access import api_keys
from accounting.batches import batch_lines, batches, files
from accounting.batches.batch_lines import LineEnd
from accounting.requests import batch_results
from accounting.requests.batch_results import LineFailures
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
