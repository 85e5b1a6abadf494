"""Any history of endings and records, with repeats, in any portions: the books verify and reports add up."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from money import NOON_MS, RATES, posting, record

from accounting.billing import reports
from accounting.billing.reports import ReportQuery
from accounting.books import books
from accounting.database import migrate
from accounting.database.db import Database
from accounting.prices import prices
from accounting.requests import request_postings
from accounting.values.types import TOKEN_CLASSES, Usage

counts = st.integers(0, 300)
usages = st.builds(Usage, *(counts for _ in TOKEN_CLASSES))


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    path = tmp_path_factory.mktemp("template") / "headgate.db"
    migrate.upgrade(f"sqlite+aiosqlite:///{path}")
    return path


@st.composite
def requests(draw, number):
    """(ending, its engine records): the engine counted at least what is billed."""
    name = f"req_{number:02d}"
    tenant = draw(st.sampled_from("ab"))
    owner = {"tenant_id": f"proj_{tenant}", "key_id": f"key_{tenant}"}
    billed = draw(usages)
    kind = draw(st.sampled_from(["settle", "settle", "void"]))
    surplus = draw(usages) if draw(st.booleans()) else Usage()
    parts = [billed, surplus] if draw(st.booleans()) else [_sum(billed, surplus)]
    opened = NOON_MS + draw(st.integers(-100_000, 100_000)) * 1000
    ending = posting(
        name,
        billed,
        kind=kind,
        opened_at_ms=opened,
        tier=draw(st.sampled_from(["interactive", "batch"])),
        model=draw(st.sampled_from("mn")),
        write_off=draw(st.sampled_from(["internal", "resume"])),
        **owner,
    )
    records = [record(name, part, attempt=n, tenant_id=owner["tenant_id"]) for n, part in enumerate(parts)]
    return ending, records


def _sum(*parts: Usage) -> Usage:
    return Usage(*(sum(getattr(part, name) for part in parts) for name in TOKEN_CLASSES))


@st.composite
def histories(draw):
    """Requests, and portions of what is posted: every item at least once, some twice."""
    made = [draw(requests(number)) for number in range(draw(st.integers(1, 6)))]
    items = [item for ending, records in made for item in (ending, *records)]
    order = draw(st.permutations([*items, *draw(st.lists(st.sampled_from(items), max_size=4))]))
    cuts = sorted(draw(st.sets(st.integers(1, len(order)), max_size=3)))
    return made, [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)]


@given(histories())
@settings(max_examples=30, deadline=None)
def test_the_books_verify_and_reports_equal_what_was_posted(template, history):
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(template, Path(folder, "x.db"))
        asyncio.run(_check(f"sqlite+aiosqlite:///{folder}/x.db", *history))


async def _check(url, made, portions):
    database = Database(url)
    try:
        async with database.write() as conn:
            await prices.bootstrap(conn, {"m": {"interactive": RATES}}, 0)
        for number, portion in enumerate(portions):
            async with database.write() as conn:
                await request_postings.post_engine_records(conn, [i for i in portion if hasattr(i, "attempt")])
                await request_postings.post(conn, 0, number, [i for i in portion if hasattr(i, "outcome")])
        async with database.read() as conn:
            await _assert_books(conn)
            settled = [ending for ending, _ in made if ending.kind == "settle"]
            await _assert_reports(conn, settled)
    finally:
        await database.close()


async def _assert_books(conn):
    report = await books.verify(conn)
    assert {e.id: e.failures for e in report.equations if e.id != "I15"} == dict.fromkeys(
        ("I1", "I2", "I4", "I5", "I8", "I9", "I17", "I18", "I19", "I20", "I21", "I22", "I23"), ()
    )


async def _assert_reports(conn, settled):
    start, end = NOON_MS // 1000 - 3 * 86_400, NOON_MS // 1000 + 3 * 86_400
    query = ReportQuery(start_time=start, end_time=end, width="1d")
    found = [r for b in (await reports.usage(conn, query, end)).buckets for r in b.results]
    assert sum(r.num_requests for r in found) == len(settled)
    assert _sum(*(r.usage for r in found)) == _sum(*(ending.usage for ending in settled))
    itemised = ReportQuery(start_time=start, end_time=end, group_by=("line_item", "project_id"))
    items = [r for b in (await reports.costs(conn, itemised, end)).buckets for r in b.results]
    assert sum(item.amount for item in items) == sum(ending.charge.total for ending in settled)
    assert sum(item.quantity for item in items) == sum(ending.usage.total for ending in settled)
