"""What the minute's look at the books sees and does."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry
from sqlalchemy import insert, text

from accounting.billing import invoices
from accounting.books import day_hashes
from accounting.books.books import any_ended, verify_ended
from accounting.books.equations import LIMITER_EQUALS_BOOKS, EquationResult
from accounting.ledger.write_off_sums import window_start_ms
from accounting.prices import prices, pricing
from accounting.requests import request_postings
from accounting.tables.upstream_models import UpstreamCall
from accounting.tenants import tenants
from accounting.upstreams import costs
from accounting.upstreams.costs import CostRow
from accounting.values.types import TOKEN_CLASSES, Usage
from gateway.books.bookkeeping import CLOSE, QUIET_MS, Bookkeeping
from gateway.books.recent_write_offs import HOUR_MS
from tests.money import NOON_MS, posting, record

DAY_MS = 86_400_000
USAGE = Usage(16, 32, 5, 100)


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def keeper(books, registry):
    made = Bookkeeping(books, registry, closes=False)
    made._checked_until_ms = NOON_MS - 1
    return made


async def post(books, name: str, counted: Usage, at_ms: int = NOON_MS) -> None:
    async with books.write() as conn:
        await request_postings.post(conn, 0, 1, [posting(name, opened_at_ms=at_ms)], now_ms=at_ms)
        await request_postings.post_engine_records(conn, [record(name, counted)], now_ms=at_ms)


async def test_honest_books_are_ok(books, keeper, registry):
    await post(books, "req_1", Usage(16, 32, 5, 100))
    await keeper.once(NOON_MS + QUIET_MS + 1)
    assert registry.get_sample_value("headgate_books_ok") == 1


async def test_a_span_is_empty_exactly_where_nothing_of_it_would_be_checked(books):
    await post(books, "req_1", Usage(16, 32, 5, 100))
    for since_ms, until_ms in ((NOON_MS - 9, NOON_MS), (NOON_MS, NOON_MS + 1), (NOON_MS + 1, NOON_MS + 9)):
        async with books.read() as conn:
            report = await verify_ended(conn, since_ms, until_ms)
            num_checked = sum(equation.num_checked for equation in report.equations)
            assert await any_ended(conn, since_ms, until_ms) == (num_checked > 0) == (since_ms == NOON_MS)


async def test_tokens_that_nobody_counted_are_an_alarm_after_two_minutes(books, keeper, registry):
    await post(books, "req_1", Usage(16, 32, 5, 99))
    await keeper.once(NOON_MS + QUIET_MS)
    assert registry.get_sample_value("headgate_books_ok") == 1
    await keeper.once(NOON_MS + QUIET_MS + 1)
    assert registry.get_sample_value("headgate_books_ok") == 0
    assert registry.get_sample_value("headgate_books_failures", {"equation": "I1"}) == 1
    await keeper.once(NOON_MS + QUIET_MS + 60_000)
    assert registry.get_sample_value("headgate_books_failures", {"equation": "I1"}) == 1


async def test_books_that_are_clean_again_are_ok_again_without_a_restart(books, keeper, registry):
    """The engine's record of a second attempt came late: until then a token was nobody's."""
    await post(books, "req_1", Usage(16, 32, 5, 99))
    await keeper.once(NOON_MS + QUIET_MS + 1)
    await keeper.once(NOON_MS + QUIET_MS + 60_001)
    assert registry.get_sample_value("headgate_books_ok") == 0
    late = record("req_1", Usage(0, 0, 0, 1), attempt=1, seq=2)
    async with books.write() as conn:
        await request_postings.post_engine_records(conn, [late], now_ms=NOON_MS)
    await keeper.once(NOON_MS + QUIET_MS + 120_001)
    assert registry.get_sample_value("headgate_books_ok") == 1
    assert registry.get_sample_value("headgate_books_failures", {"equation": "I1"}) == 0


async def test_a_limiter_that_drifted_is_an_alarm_until_it_agrees(books, registry):
    """The real check is test_limiter_truth.py's."""
    drifted = ["budget_1@0"]

    async def truth() -> EquationResult:
        return EquationResult(LIMITER_EQUALS_BOOKS, 1, tuple(drifted))

    keeper = Bookkeeping(books, registry, False, truth)
    await keeper.once(NOON_MS)
    assert registry.get_sample_value("headgate_books_ok") == 0
    assert registry.get_sample_value("headgate_books_failures", {"equation": "I13"}) == 1
    drifted.clear()
    await keeper.once(NOON_MS + 60_000)
    assert registry.get_sample_value("headgate_books_ok") == 1


async def test_a_clock_that_steps_back_counts_no_write_off_twice(books, keeper, registry):
    await post(books, "req_1", Usage(16, 32, 5, 110))
    counted = []
    for now_ms in (NOON_MS + QUIET_MS + 1, NOON_MS - 3_600_000, NOON_MS + QUIET_MS + 60_000):
        await keeper.once(now_ms)
        samples = [one for family in registry.collect() for one in family.samples]
        counted.append(sum(one.value for one in samples if one.name == "headgate_writeoff_tokens_total"))
    assert counted[0] > 0
    assert counted == counted[:1] * 3


async def test_a_day_that_is_over_is_sealed_once_by_whoever_comes_first(books, registry):
    await post(books, "req_1", Usage(16, 32, 5, 100))
    keepers = [Bookkeeping(books, CollectorRegistry(), closes=False) for _ in range(3)]
    await asyncio.gather(*(keeper.once(NOON_MS + DAY_MS) for keeper in keepers))
    async with books.read() as conn:
        assert await conn.scalar(text("SELECT count(*) FROM day_seal")) == 1


async def test_nobody_waits_to_write_while_the_rows_of_a_day_are_read(books, keeper, monkeypatch):
    """A day's rows were hashed in the writer's transaction: at a million rows no limit could be read for 37 s."""
    await post(books, "req_1", Usage(16, 32, 5, 100))
    keeper._checked_until_ms = NOON_MS + DAY_MS - QUIET_MS
    reading, go_on = asyncio.Event(), asyncio.Event()
    digest = day_hashes._digest

    async def slow(*args):
        reading.set()
        await go_on.wait()
        return await digest(*args)

    monkeypatch.setattr(day_hashes, "_digest", slow)
    minute = asyncio.create_task(keeper.once(NOON_MS + DAY_MS))
    await reading.wait()
    try:
        async with asyncio.timeout(2):
            await post(books, "req_2", Usage(16, 32, 5, 100), NOON_MS + DAY_MS)
    finally:
        go_on.set()
    await minute
    async with books.read() as conn:
        assert (await conn.execute(text("SELECT num_entries FROM day_seal"))).all() == [(1,)]


async def test_one_day_is_sealed_in_a_minute_and_then_checked(books, keeper, registry):
    await post(books, "req_1", Usage(16, 32, 5, 99))
    keeper._checked_until_ms = NOON_MS + 5 * DAY_MS - QUIET_MS  # the minutes before are not this test's
    for number in range(3):
        await keeper.once(NOON_MS + 5 * DAY_MS + number * 60_000)
        async with books.read() as conn:
            assert await conn.scalar(text("SELECT count(*) FROM day_seal")) == number + 1
    assert registry.get_sample_value("headgate_books_failures", {"equation": "I1"}) == 1


async def test_a_month_is_closed_by_itself_where_that_is_wanted(books):
    async with books.write() as conn:
        tenant = (await tenants.create(conn, "a", now=1)).id
        rates = await prices.rates_of(conn, "standard@1", "m", "interactive")
        charge = pricing.charge(Usage(16, 32, 5, 100), rates)
        await request_postings.post(conn, 0, 1, [posting("req_1", tenant_id=tenant, charge=charge)])
    for closes, number in ((False, 0), (True, 1), (True, 1)):
        keeper = Bookkeeping(books, CollectorRegistry(), closes=closes)
        await keeper.once(NOON_MS + 40 * DAY_MS)
        async with books.read() as conn:
            assert await conn.scalar(text("SELECT count(*) FROM invoice")) == number
            total = await conn.scalar(text("SELECT total FROM invoice"))
            assert total == (charge.total if number else None)


async def used(books, *months: int, cost: int = 0) -> str:
    """A new tenant with a request in each of the months after NOON_MS, which cost that much more than their price."""
    async with books.write() as conn:
        tenant = (await tenants.create(conn, f"used {months} {cost}", now=1)).id
        charge = pricing.charge(USAGE, await prices.rates_of(conn, "standard@1", "m", "interactive"))
        charge = replace(charge, total=charge.total + cost, output=charge.output + cost)
        for month in months:
            at_ms = NOON_MS + month * 31 * DAY_MS
            one = posting(f"req_{tenant}_{month}", USAGE, tenant_id=tenant, charge=charge, opened_at_ms=at_ms)
            await request_postings.post(conn, 0, month + 1, [one], now_ms=at_ms)
    return tenant


async def test_open_months_are_closed_by_themselves_the_oldest_first(books):
    tenant = await used(books, 0, 1)
    keeper = Bookkeeping(books, CollectorRegistry(), closes=True)
    await keeper.once(NOON_MS + 100 * DAY_MS)
    async with books.read() as conn:
        found = await conn.execute(text("SELECT tenant_id, period FROM invoice ORDER BY sequence"))
        assert list(found) == [(tenant, period) for period in ("2023-11", "2023-12")]


async def test_a_month_that_cannot_be_closed_stops_no_other_tenant_and_is_no_broken_equation(books, registry):
    refused, closed = await used(books, 0, 1, cost=1), await used(books, 0)
    keeper = Bookkeeping(books, registry, closes=True)
    keeper._checked_until_ms = NOON_MS + 100 * DAY_MS - QUIET_MS
    await keeper.once(NOON_MS + 100 * DAY_MS)
    async with books.read() as conn:
        assert list((await conn.execute(text("SELECT tenant_id FROM invoice"))).scalars()) == [closed]
    assert registry.get_sample_value("headgate_books_failures", {"equation": "close"}) == 1, refused
    assert registry.get_sample_value("headgate_books_failures", {"equation": "I9"}) is None


async def test_a_month_that_was_refused_is_tried_again_after_an_hour(books, registry, monkeypatch):
    await used(books, 0, cost=1)
    tried, close = [], invoices.close

    async def noted(*arguments, now_ms, **rest):
        tried.append(now_ms)
        return await close(*arguments, now_ms=now_ms, **rest)

    monkeypatch.setattr(invoices, "close", noted)
    keeper = Bookkeeping(books, registry, closes=True)
    start_ms = NOON_MS + 100 * DAY_MS
    keeper._checked_until_ms = start_ms - QUIET_MS
    for after_ms in (0, 60_000, 3_599_999, 3_600_000):
        await keeper.once(start_ms + after_ms)
        assert registry.get_sample_value("headgate_books_failures", {"equation": "close"}) == 1
    assert tried == [start_ms, start_ms + 3_600_000]


async def test_books_are_ok_where_a_month_is_refused_that_breaks_no_equation(books, registry, monkeypatch):
    async def refused(now_ms):
        return [(CLOSE, "proj_1 2023-11: The tenant was charged in more than one currency.")]

    keeper = Bookkeeping(books, registry, closes=True)
    monkeypatch.setattr(keeper, "_close", refused)
    await keeper.once(NOON_MS)
    assert registry.get_sample_value("headgate_books_failures", {"equation": CLOSE}) == 1
    assert registry.get_sample_value("headgate_books_ok") == 1


async def test_a_bill_that_came_before_its_call_is_judged_again_within_a_minute(books, keeper):
    counts = {f"{kind}_{name}": 1 for kind in ("stated", "judged") for name in TOKEN_CLASSES}
    call = {"request_id": "req_1", "attempt": 0, "tenant_id": "operator", "upstream": "u", "model": "m"}
    call |= {"state": "delivered", "started_at_ms": 1, "provider_id": "id-1", "expected_cost": 500, **counts}
    call |= {"has_statement": True, "drift": "", "stated_cost": None}
    async with books.write() as conn:
        await costs.add(conn, "u", [CostRow("row", "id-1", 500, 1)], NOON_MS, "operator")
        await conn.execute(insert(UpstreamCall).values(**call))
    await keeper.once(NOON_MS)
    async with books.read() as conn:
        assert [(one.matched, one.drift) for one in await costs.sums(conn)] == [(500, {})]


SEQS = itertools.count(1)


async def lose(books, tenant: str, num_charged: int, num_lost: int, at_ms: int = NOON_MS, **more: int) -> None:
    """Posts a request of which the tenant pays a part of what the engine counted."""
    name, mine = f"req_{tenant}_{at_ms}", {"tenant_id": tenant, "opened_at_ms": at_ms, "write_off": "worker_crash"}
    counted = Usage(0, 0, 0, num_charged + num_lost)
    async with books.write() as conn:
        ending = posting(name, Usage(0, 0, 0, num_charged), **mine)
        await request_postings.post(conn, 0, 1, [ending], now_ms=at_ms)
        made = record(name, counted, seq=next(SEQS), tenant_id=tenant, **more)
        await request_postings.post_engine_records(conn, [made], now_ms=at_ms)


async def test_a_tenant_of_whom_more_than_1_percent_is_written_off_is_named_and_counted(
    books, keeper, registry, caplog
):
    await lose(books, "proj_most", 100_000, 3_000)
    await lose(books, "proj_some", 100_000, 1_100)
    await lose(books, "proj_share", 200_000, 1_900)
    await lose(books, "proj_tiny", 10, 900)
    await lose(books, "proj_guesses", 1_000, 0, speculated=50_000, recomputed=50_000)
    await lose(books, "operator", 0, 50_000)
    for minute in (0, 1):
        await keeper.once(NOON_MS + QUIET_MS + 1 + 60_000 * minute)
        assert registry.get_sample_value("headgate_writeoff_tenants") == 2
        assert keeper.watched["written_off"] == [
            {"project_id": "proj_most", "num_tokens": 3_000, "share": 0.0291, "reason": "worker_crash"},
            {"project_id": "proj_some", "num_tokens": 1_100, "share": 0.0109, "reason": "worker_crash"},
        ]
    named = [one.tenant for one in caplog.records if one.getMessage() == "tenant_written_off"]
    assert named == ["proj_most", "proj_some"]


async def test_write_offs_of_an_hour_are_judged_after_a_restart_and_forgotten_with_their_hour(books, registry):
    await lose(books, "proj_a", 0, 5_000, NOON_MS - 1_800_000)
    keeper = Bookkeeping(books, registry, closes=False)
    keeper._checked_until_ms = NOON_MS
    for minutes, num_losing in ((0, 1), (59, 1), (60, 0)):
        await keeper.once(NOON_MS + QUIET_MS + 60_000 * minutes)
        assert registry.get_sample_value("headgate_writeoff_tenants") == num_losing, minutes
    assert not sum(
        one.value
        for family in registry.collect()
        for one in family.samples
        if one.name == "headgate_writeoff_tokens_total"
    ), "what was written off before the process began is not counted"


async def test_what_was_written_off_in_an_outage_counts_to_its_own_hour(books, keeper):
    """A round after hours without SQL covers all of them."""
    lost_ms, until_ms = NOON_MS + 5 * HOUR_MS + 1, NOON_MS + 5 * HOUR_MS + HOUR_MS // 2
    await lose(books, "proj_a", 0, 5_000, lost_ms)
    await keeper._count_write_offs(NOON_MS - HOUR_MS // 2, until_ms)
    assert keeper._recent.since(window_start_ms(until_ms)) == {("proj_a", "worker_crash"): 5_000}


async def test_a_round_that_failed_counts_no_write_off_of_a_tenant_twice(books, keeper, monkeypatch):
    await lose(books, "proj_a", 0, 1_500)

    async def fails(*_: object) -> None:
        raise OSError("no SQL")

    with monkeypatch.context() as broken:
        broken.setattr("gateway.books.bookkeeping.losses", fails)
        with pytest.raises(OSError, match="no SQL"):
            await keeper.once(NOON_MS + QUIET_MS + 1)
    await keeper.once(NOON_MS + QUIET_MS + 1)
    assert [one["num_tokens"] for one in keeper.watched["written_off"]] == [1_500]
