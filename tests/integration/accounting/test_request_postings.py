"""Posting: once by primary key, whatever is repeated, reordered or run in parallel."""

from __future__ import annotations

import asyncio

import pytest
from money import NOON_MS, posting, record
from msgspec.structs import replace
from sqlalchemy import func, select

from accounting.books import books
from accounting.requests import request_postings
from accounting.tables.models import LedgerEntry, LedgerLeg, RollupDay, RollupMinute
from accounting.values.types import Usage

NONE = Usage()


async def rows(conn, *columns, kind=None):
    query = select(*columns).order_by(LedgerEntry.request_id, LedgerEntry.kind, LedgerEntry.attempt)
    if kind is not None:
        query = query.where(LedgerEntry.kind == kind)
    return [tuple(row) for row in await conn.execute(query)]


async def written_off(conn):
    counts = (LedgerEntry.cache_read, LedgerEntry.cache_write, LedgerEntry.uncached, LedgerEntry.output)
    found = await rows(conn, LedgerEntry.kind, LedgerEntry.attempt, *counts)
    return {(kind, attempt): Usage(*usage) for kind, attempt, *usage in found if kind not in ("settle", "void")}


async def test_a_repeated_posting_changes_nothing_and_says_so(conn):
    batch = [posting("req_1"), posting("req_2", kind="void")]
    assert await request_postings.post(conn, 0, 10, batch) == 2
    before = await rows(conn, *LedgerEntry.__table__.c)
    requests = await conn.scalar(select(RollupMinute.num_requests))
    assert await request_postings.post(conn, 0, 20, [*batch, posting("req_3", kind="void")]) == 1
    assert (await rows(conn, *LedgerEntry.__table__.c))[:2] == before
    assert requests == await conn.scalar(select(RollupMinute.num_requests)) == 1
    assert await request_postings.journal_offset(conn, 0) == 20
    assert await request_postings.journal_offset(conn, 1) is None


async def test_the_first_ending_of_a_request_decides(conn):
    result = await request_postings.post(conn, 0, 1, [posting("req_1", kind="void"), posting("req_1")])
    assert result == 1
    assert await request_postings.post(conn, 0, 2, [posting("req_1")]) == 0
    assert await rows(conn, LedgerEntry.kind) == [("void",)]
    assert await conn.scalar(select(func.count()).select_from(RollupDay.__table__)) == 0


async def test_offset_and_rows_are_one_transaction(db):
    with pytest.raises(RuntimeError):
        await _post_and_fail(db)
    async with db.read() as conn:
        assert await request_postings.journal_offset(conn, 0) is None
        assert await rows(conn, LedgerEntry.request_id) == []


async def _post_and_fail(db):
    async with db.write() as conn:
        await request_postings.post(conn, 0, 5, [posting("req_1")])
        raise RuntimeError


@pytest.mark.parametrize("record_first", [True, False])
async def test_whichever_comes_second_writes_the_difference_off(conn, record_first):
    async def engine() -> None:
        counted = record("req_1", Usage(16, 32, 9, 130), speculated=7, recomputed=3)
        assert await request_postings.post_engine_records(conn, [counted]) == 1
        assert await request_postings.post_engine_records(conn, [counted]) == 0

    async def gateway() -> None:
        await request_postings.post(conn, 0, 1, [posting("req_1", Usage(16, 32, 5, 100), write_off="late_abort")])

    for step in (engine, gateway) if record_first else (gateway, engine):
        await step()
    assert await written_off(conn) == {
        ("late_abort", 0): Usage(0, 0, 4, 30),
        ("speculation", 0): NONE,
        ("recompute", 0): NONE,
    }
    extras = await rows(conn, LedgerEntry.kind, LedgerEntry.speculated, LedgerEntry.recomputed, LedgerEntry.charge)
    assert ("speculation", 7, 0, 0) in extras
    assert ("recompute", 0, 3, 0) in extras


@pytest.mark.parametrize("record_first", [True, False])
async def test_of_a_void_everything_is_written_off_under_its_reason(conn, record_first):
    void = [posting("req_1", kind="void", outcome="gateway_crash", write_off="gateway_crash")]
    if record_first:
        await request_postings.post_engine_records(conn, [record("req_1")])
        await request_postings.post(conn, 0, 1, void)
    else:
        await request_postings.post(conn, 0, 1, void)
        await request_postings.post_engine_records(conn, [record("req_1")])
    assert await written_off(conn) == {("gateway_crash", 0): Usage(16, 32, 5, 100)}


async def test_equal_counts_need_no_write_off(conn):
    await request_postings.post(conn, 0, 1, [posting("req_1")])
    await request_postings.post_engine_records(conn, [record("req_1")])
    assert await written_off(conn) == {}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (1, 0, 2)])
async def test_several_attempts_are_billed_once_in_whatever_order_they_arrive(conn, order):
    """Attempt 0 died after 40 tokens, attempt 1 read its prefill from the cache and did the rest."""
    billed = Usage(0, 48, 5, 100)

    async def ending() -> None:
        await request_postings.post(conn, 0, 1, [posting("req_1", billed, write_off="resume")])

    steps = (
        ending,
        lambda: request_postings.post_engine_records(conn, [record("req_1", Usage(0, 48, 5, 44))]),
        lambda: request_postings.post_engine_records(conn, [record("req_1", Usage(48, 0, 45, 60), attempt=1)]),
    )
    for number in order:
        await steps[number]()
    lost = await written_off(conn)
    total = [
        sum(getattr(usage, name) for usage in lost.values())
        for name in ("cache_read", "cache_write", "uncached", "output")
    ]
    assert total == [48, 0, 45, 4]
    report = await books.verify(conn)
    assert {e.id: e.failures for e in report.equations if e.id in ("I1", "I2", "I4")} == {"I1": (), "I2": (), "I4": ()}
    assert not await request_postings.half_witnessed(conn, 0, 2**62)


async def test_what_a_gateway_counted_itself_waits_for_the_lost_workers_record(conn):
    ended = posting("req_1", Usage(0, 48, 5, 100), write_off="worker_crash")
    await request_postings.post(conn, 0, 1, [ended, posting("req_2")], now_ms=7)
    assert await request_postings.half_witnessed(conn, 7, 8) == {"req_1"}
    await request_postings.post_engine_records(conn, [record("req_1", Usage(0, 48, 5, 60), attempt=1), record("req_2")])
    assert await request_postings.half_witnessed(conn, 7, 8) == {"req_1"}
    await request_postings.post_engine_records(conn, [record("req_1", Usage(0, 48, 5, 44))])
    assert not await request_postings.half_witnessed(conn, 7, 8)


async def test_the_record_of_a_lost_worker_is_no_witness_of_the_end(conn):
    """The record of the worker that went on comes some moments later."""
    await request_postings.post(conn, 0, 1, [posting("req_1"), posting("req_2")], now_ms=7)
    lost = replace(record("req_1", Usage(0, 48, 5, 44)), reason="link_lost")
    await request_postings.post_engine_records(conn, [lost, record("req_2")])
    assert await request_postings.unwitnessed(conn, 7) == {"req_1"}
    assert not await request_postings.unwitnessed(conn, 8)
    await request_postings.post_engine_records(conn, [record("req_1", Usage(0, 48, 5, 56), attempt=1)])
    assert not await request_postings.unwitnessed(conn, 7)


async def test_a_request_lacks_the_record_of_a_worker_that_was_lost_until_that_is_back(conn):
    await request_postings.post(conn, 0, 1, [posting(f"req_{n}", Usage(0, 48, 5, 100)) for n in range(3)], now_ms=7)
    second = [record("req_1", Usage(48, 0, 5, 60), attempt=1), record("req_2", Usage(48, 0, 5, 20), attempt=2)]
    await request_postings.post_engine_records(conn, [record("req_0"), *second])
    assert await request_postings.half_witnessed(conn, 7, 8) == {"req_1", "req_2"}
    assert not await request_postings.half_witnessed(conn, 8, 2**62)
    late = [record("req_1", Usage(0, 48, 5, 44)), record("req_2", Usage(0, 48, 5, 44), attempt=1)]
    await request_postings.post_engine_records(conn, late)
    assert await request_postings.half_witnessed(conn, 7, 8) == {"req_2"}  # of its first worker


async def test_a_batch_line_is_charged_once_whatever_requests_were_sent_for_it(conn):
    line = {"tier": "batch", "batch_id": "batch_1", "line_no": 7}
    await request_postings.post(conn, 0, 1, [posting("req_1", **line)])
    again = [posting("req_2", **line), posting("req_3", tier="batch", batch_id="batch_1", line_no=8)]
    await request_postings.post(conn, 0, 2, [*again, posting("req_1", **line)])
    await request_postings.post(conn, 0, 3, again)
    await request_postings.post_engine_records(conn, [record("req_2")])
    kinds = await rows(conn, LedgerEntry.request_id, LedgerEntry.kind)
    assert kinds == [("req_1", "settle"), ("req_2", "batch_retry"), ("req_2", "void"), ("req_3", "settle")]
    assert await conn.scalar(select(func.sum(RollupDay.num_requests))) == 2


async def test_two_requests_for_one_line_in_one_transaction_are_charged_once(conn):
    line = {"tier": "batch", "batch_id": "batch_1", "line_no": 7}
    await request_postings.post(conn, 0, 1, [posting("req_2", **line), posting("req_1", **line)])
    assert await rows(conn, LedgerEntry.request_id, LedgerEntry.kind) == [("req_1", "settle"), ("req_2", "void")]


async def test_legs_of_a_settle_name_tokens_and_money_by_class(conn):
    await request_postings.post(conn, 0, 1, [posting("req_1", Usage(1_000_000, 0, 0, 1_000_000))])
    columns = LedgerLeg.__table__.c
    found = await conn.execute(select(columns.account, columns.unit, columns.token_class, columns.amount))
    assert {tuple(row) for row in found} == {
        ("tenant_usage", "tokens", "cache_read", 1_000_000),
        ("engine_production", "tokens", "cache_read", -1_000_000),
        ("tenant_usage", "tokens", "output", 1_000_000),
        ("engine_production", "tokens", "output", -1_000_000),
        ("tenant_receivable", "USD", "", 410_000),
        ("revenue", "USD", "cache_read", -10_000),
        ("revenue", "USD", "output", -400_000),
    }


async def test_a_request_counts_in_the_minute_hour_and_day_of_its_start(conn):
    opened = NOON_MS - 1
    await request_postings.post(conn, 0, 1, [posting("req_1", opened_at_ms=opened, ended_at_ms=opened + 10**8)])
    assert await conn.scalar(select(RollupMinute.bucket)) == NOON_MS // 1000 - 60
    assert await conn.scalar(select(RollupDay.bucket)) == NOON_MS // 1000 - 43_200


async def test_parallel_posters_of_overlapping_sets_post_each_request_once(db):
    endings = [posting(f"req_{n:03d}", key_id=f"key_{n % 3}") for n in range(60)]
    records = [record(f"req_{n:03d}", Usage(16, 32, 5, 100 + n)) for n in range(60)]

    async def post(slot: int) -> int:
        async with db.write() as conn:
            shuffled = endings[slot * 7 :] + endings[: slot * 7]
            return await request_postings.post(conn, slot, slot, shuffled[:45])

    async def witness(start: int) -> int:
        async with db.write() as conn:
            return await request_postings.post_engine_records(conn, records[start : start + 40])

    results = await asyncio.gather(*(post(slot) for slot in range(4)), *(witness(n) for n in (0, 10, 20)))
    assert sum(results[:4]) == 60
    assert sum(results[4:]) == 60
    async with db.read() as conn:
        assert await conn.scalar(select(func.sum(RollupDay.num_requests))) == 60
        output = select(func.sum(LedgerEntry.output))
        assert await conn.scalar(output) == sum(r.usage.output for r in records)
        assert await conn.scalar(output.where(LedgerEntry.kind == "settle")) == 6000


async def test_thousands_of_postings_fit_into_one_transaction(conn):
    endings = [posting(f"req_{n:05d}") for n in range(2500)]
    assert await request_postings.post(conn, 0, 1, endings) == 2500
    assert await request_postings.post(conn, 0, 1, endings) == 0
    assert await conn.scalar(select(RollupMinute.num_requests)) == 2500
