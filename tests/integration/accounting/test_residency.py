"""KV that caches keep for tenants: read by hour, charged once, on the invoice, and proved by the books."""

from __future__ import annotations

import asyncio
import random
from decimal import Decimal

import msgspec
import pytest
from sqlalchemy import event, insert, select, text

from accounting.billing import invoices, reports, residency, residency_sums
from accounting.billing.reports import ReportQuery
from accounting.billing.residency import GRACE_MS, HOUR_S, KEPT_MS, Reading
from accounting.books import books
from accounting.exports import focus
from accounting.prices import prices, pricing
from accounting.tables.residency_models import ResidencyCharge, ResidencyReading
from accounting.values.periods import bounds
from tests.billing_world import CHEAP, CLOSED_MS, END, PERIOD, START, tenants_with_keys

GB_HOUR = 10**9 * 3_600_000
RATES = (7_777, 33_333)
"""Micro-units per GB and hour: of the cache, of pinned prefixes."""


@pytest.fixture
async def tenant(db):
    """Of two tenants the one without a sheet of its own; model `m` has rates for residency, `n` has none."""
    _, (tenant, _) = await tenants_with_keys(db, 2)
    async with db.write() as conn:
        rates = {("m", "interactive"): CHEAP, ("n", "interactive"): CHEAP}
        await prices.add_version(conn, prices.DEFAULT_SHEET, rates, START * 1000, residency={"m": RATES})
    return tenant


def reading(tenant, hour=START, cache=GB_HOUR, pinned=0, model="m", process="p1") -> Reading:
    return Reading(hour, tenant, model, process, cache, pinned)


def due_ms(hour: int) -> int:
    return (hour + HOUR_S) * 1000 + GRACE_MS


async def note(db, *readings):
    async with db.write() as conn:
        await residency.note(conn, readings)


async def charge(db, now_ms):
    async with db.write() as conn:
        return await residency.charge_due(conn, now_ms)


async def charges(db):
    async with db.read() as conn:
        query = select(ResidencyCharge.__table__).order_by(ResidencyCharge.hour, ResidencyCharge.attempt)
        return (await conn.execute(query)).all()


async def broken(db):
    async with db.read() as conn:
        report = await books.verify(conn)
    return {e.id: e.failures for e in report.equations if not e.ok}


async def test_an_hour_is_charged_once_ten_minutes_after_its_end(db, tenant):
    await note(db, reading(tenant, cache=GB_HOUR * 3 // 2, pinned=GB_HOUR))
    assert await charge(db, due_ms(START) - 1) == 0
    assert await charge(db, due_ms(START)) == 1
    assert await charge(db, due_ms(START) + 60_000) == 0
    [row] = await charges(db)
    # 11,665.5 + 33,333 is 44,998.5: half to even.
    assert row.charge_cache + row.charge_pinned == 44_998
    assert (row.tenant_id, row.hour, row.price_version) == (tenant, START, "standard@2")
    async with db.read() as conn:
        legs = await conn.execute(text("SELECT account, unit, amount FROM ledger_leg ORDER BY 1"))
        assert list(legs) == [("revenue", "USD", -44_998), ("tenant_receivable", "USD", 44_998)]
    assert await broken(db) == {}


async def test_readings_come_twice_and_in_any_order_and_from_many_processes(db, tenant):
    chance = random.Random(1)
    sent = [
        reading(tenant, cache=step * GB_HOUR // 10, process=process)
        for process in ("p1", "p2")
        for step in (*range(1, 11), *range(1, 11))
    ]
    chance.shuffle(sent)
    for one in sent:
        await note(db, one)
    await charge(db, due_ms(START))
    [row] = await charges(db)
    assert (row.cache, row.charge_cache) == (2 * GB_HOUR, 2 * RATES[0])


async def test_what_is_read_late_is_charged_by_itself(db, tenant):
    await note(db, reading(tenant))
    await charge(db, due_ms(START))
    await note(db, reading(tenant, cache=GB_HOUR * 2), reading(tenant, process="late"))
    assert await charge(db, due_ms(START) + 1) == 1
    assert [(row.attempt, row.cache) for row in await charges(db)] == [(0, GB_HOUR), (1, 2 * GB_HOUR)]
    assert await broken(db) == {}


async def test_without_a_rate_or_a_tenant_nothing_is_charged(db, tenant):
    await note(db, reading(tenant, model="n"), reading("proj_nobody"), reading("operator"), reading(tenant, cache=0))
    assert await charge(db, due_ms(START)) == 0
    assert await charge(db, START * 1000 + KEPT_MS + 1000 * HOUR_S) == 0
    async with db.read() as conn:
        assert (await conn.execute(select(ResidencyReading.hour))).first() is None  # forgotten


async def test_an_hour_is_charged_at_the_sheet_and_the_version_in_force_when_it_began(db, tenant):
    other = {"m": (1, 1)}
    async with db.write() as conn:
        rates = {("m", "interactive"): CHEAP}
        await prices.add_version(conn, prices.DEFAULT_SHEET, rates, (START + HOUR_S) * 1000, residency=other)
        await prices.add_version(conn, "own", rates, (START + HOUR_S) * 1000, residency=other)
        await prices.assign(conn, tenant, "own", (START + 2 * HOUR_S) * 1000, (START + 3 * HOUR_S) * 1000)
        await prices.add_version(conn, "own", rates, (START + 4 * HOUR_S) * 1000)
        await prices.assign(conn, tenant, "own", (START + 4 * HOUR_S) * 1000)
    await note(db, *(reading(tenant, START + n * HOUR_S) for n in range(-1, 5)))
    assert await charge(db, due_ms(START + 4 * HOUR_S)) == 4
    versions = ["standard@2", "standard@3", "own@2", "standard@3"]
    assert [(row.hour, row.price_version) for row in await charges(db)] == [
        (START + n * HOUR_S, version) for n, version in enumerate(versions)
    ]
    assert await broken(db) == {}


async def num_statements(db, now_ms: int) -> int:
    """Statements of a round that charges nothing."""
    found = 0

    def count(*_: object) -> None:
        nonlocal found
        found += 1

    async with db.write() as conn:
        event.listen(conn.sync_connection, "before_cursor_execute", count)
        assert await residency.charge_due(conn, now_ms) == 0
        event.remove(conn.sync_connection, "before_cursor_execute", count)
    return found


@pytest.mark.parametrize("kept", [{"cache": GB_HOUR}, {"cache": 1}, {"model": "n"}], ids=["charged", "tiny", "free"])
async def test_a_round_with_nothing_to_charge_takes_the_same_few_statements_for_any_readings(db, tenant, kept):
    """Postings of all requests wait for this round, each minute."""
    now_ms = due_ms(START + 40 * HOUR_S)
    await note(db, *(reading(tenant, START + n * HOUR_S, **kept) for n in range(40)))
    await charge(db, now_ms)
    assert await num_statements(db, now_ms) <= 7


async def test_without_any_price_of_kept_kv_the_readings_are_not_looked_at(db):
    ((tenant, _),) = await tenants_with_keys(db, 1)
    await note(db, *(reading(tenant, START + n * HOUR_S) for n in range(40)))
    assert await num_statements(db, due_ms(START + 40 * HOUR_S)) <= 4


async def test_a_month_is_invoiced_with_the_late_hours_on_the_next(db, tenant):
    hours = [START, START + 5 * HOUR_S, END - HOUR_S]
    await note(db, *(reading(tenant, hour, GB_HOUR + 1, pinned=7) for hour in hours))
    for hour in hours:
        await charge(db, due_ms(hour))
    async with db.read() as conn:
        assert await invoices.due_tenants(conn, PERIOD) == [tenant]
    made = await invoices.close(db, tenant, PERIOD, now_ms=CLOSED_MS, actor="system")
    total = sum(row.charge_cache + row.charge_pinned for row in await charges(db))
    assert made.total == total == sum(made.days) == 3 * pricing.residency_charge((GB_HOUR + 1, 7), RATES)[0]
    [line] = [line for line in made.lines if line.amount]
    assert (line.token_class, line.quantity, line.rate) == ("residency_cache", 3 * 10**9, RATES[0])
    assert await broken(db) == {}
    # The readings are still there: what comes after the close is a line of its own month.
    await note(db, reading(tenant, END - HOUR_S, GB_HOUR * 3), reading(tenant, END))
    await charge(db, CLOSED_MS + 1)
    later = await invoices.close(db, tenant, "2025-10", now_ms=CLOSED_MS + 32 * 86_400_000, actor="system")
    assert sorted((line.period, line.amount > 0) for line in later.lines) == [(PERIOD, True), ("2025-10", True)]
    charged = sum(row.charge_cache + row.charge_pinned for row in await charges(db))
    assert made.total + later.total == charged
    assert await broken(db) == {}


async def test_charges_cannot_be_edited_and_a_wrong_one_is_named(db, tenant):
    await note(db, reading(tenant))
    await charge(db, due_ms(START))
    [row] = await charges(db)
    for statement in ("UPDATE residency_charge SET charge_cache = 1", "DELETE FROM residency_charge"):
        async with db.write() as conn:
            with pytest.raises(Exception, match="append-only"):
                await conn.execute(text(statement))
    async with db.write() as conn:
        wrong = {**row._mapping, "attempt": 1, "charge_cache": 1}
        await conn.execute(ResidencyCharge.__table__.insert().values(**wrong))
    assert await broken(db) == {"I2": (row.request_id,), "I9": (row.request_id,)}


@pytest.mark.parametrize("seed", range(20))
def test_the_parts_of_a_charge_add_up_to_its_one_rounding(seed):
    chance = random.Random(seed)
    kept = [chance.randrange(10**17), chance.randrange(10**17)]
    rates = [chance.randrange(10**6), chance.randrange(10**6)]
    parts = pricing.residency_charge(kept, rates)
    exact = sum(k * r for k, r in zip(kept, rates, strict=True))
    assert abs(sum(parts) * GB_HOUR - exact) * 2 <= GB_HOUR
    for part, k, r in zip(parts, kept, rates, strict=True):
        assert abs(part * GB_HOUR - k * r) < GB_HOUR


async def test_costs_have_it_as_line_items_of_their_own(db, tenant):
    hours = (START, START + HOUR_S, START + 24 * HOUR_S)
    await note(db, *(reading(tenant, hour, pinned=2 * GB_HOUR) for hour in hours))
    await charge(db, due_ms(hours[-1]))
    asked = ReportQuery(start_time=START, end_time=START + 48 * HOUR_S, group_by=("project_id",))
    async with db.read() as conn:
        whole = await reports.costs(conn, asked, START)
        split = await reports.costs(conn, msgspec.structs.replace(asked, group_by=("line_item",)), START)
        pinned = await reports.costs(conn, msgspec.structs.replace(asked, line_items=("m, residency_pinned",)), START)
        of_a_key = await reports.costs(conn, msgspec.structs.replace(asked, key_ids=("key_a",)), START)
        of_others = await reports.costs(conn, msgspec.structs.replace(asked, tenant_ids=("proj_x",)), START)
    each = RATES[0] + 2 * RATES[1]
    assert [[r.amount for r in b.results] for b in whole.buckets] == [[2 * each], [each]]
    assert whole.buckets[0].results[0].tenant_id == tenant
    assert {r.line_item: (r.amount, r.quantity, r.unit) for r in split.buckets[0].results} == {
        "m, residency_cache": (2 * RATES[0], 2 * 10**9, "byte_hours"),
        "m, residency_pinned": (4 * RATES[1], 4 * 10**9, "byte_hours"),
    }
    assert [b.results[0].amount for b in pinned.buckets] == [4 * RATES[1], 2 * RATES[1]]
    assert not any(b.results for b in (*of_a_key.buckets, *of_others.buckets))


async def test_a_page_of_costs_has_a_bounded_number_of_them(db, tenant, monkeypatch):
    await note(db, *(reading(tenant, START + n * HOUR_S, pinned=2 * GB_HOUR) for n in range(4)))
    await charge(db, due_ms(START + 3 * HOUR_S))
    monkeypatch.setattr(reports, "MAX_RESULTS", 4, raising=False)
    asked = ReportQuery(start_time=START, end_time=START + 5 * HOUR_S, width="1h", group_by=("line_item",))
    async with db.read() as conn:
        first = await reports.costs(conn, asked, START)
        rest = await reports.costs(conn, msgspec.structs.replace(asked, page=first.next_page), START)
    assert [len(b.results) for b in first.buckets] == [2, 2]
    assert [len(b.results) for b in rest.buckets] == [2, 2, 0]


async def test_a_range_has_the_hours_that_begin_in_it(db, tenant):
    await note(db, *(reading(tenant, START + n * HOUR_S) for n in range(3)))
    await charge(db, due_ms(START + 2 * HOUR_S))
    asked = ReportQuery(start_time=START + HOUR_S, end_time=START + 2 * HOUR_S)
    async with db.read() as conn:
        report = await reports.costs(conn, asked, START)
    assert [[r.amount for r in b.results] for b in report.buckets] == [[RATES[0]]]


async def test_focus_has_a_row_per_day_and_class(db, tenant):
    await note(db, *(reading(tenant, START + n * HOUR_S, pinned=GB_HOUR // 2) for n in range(25)))
    await charge(db, due_ms(START + 24 * HOUR_S))
    pages = [page async for page in focus.rows(db, START, END)]
    rows = [dict(zip(focus.COLUMNS, row, strict=True)) for page in pages for row in page]
    assert [(r["ChargePeriodStart"][:10], r["SkuMeter"], r["PricingQuantity"]) for r in rows] == [
        (f"{PERIOD}-01", "residency_cache", 24),
        (f"{PERIOD}-01", "residency_pinned", 12),
        (f"{PERIOD}-02", "residency_cache", 1),
        (f"{PERIOD}-02", "residency_pinned", Decimal("0.5")),
    ]
    async with db.read() as conn:
        charged = await conn.scalar(text("SELECT SUM(charge_cache + charge_pinned) FROM residency_charge"))
    assert sum(row["BilledCost"] for row in rows) == Decimal(charged).scaleb(-6)
    first = rows[0]
    assert first["ListUnitPrice"] == Decimal(RATES[0]).scaleb(-6) == first["ContractedUnitPrice"]
    assert (first["PricingUnit"], first["ConsumedQuantity"], first["SubAccountId"]) == ("GB-Hours", 24 * 10**9, None)


async def test_a_month_of_kept_kv_alone_that_the_next_invoice_has_is_in_focus_once(db, tenant):
    """Its rows by day stood under no invoice, and the next month's export had their amount once more."""
    hours = (START, END - HOUR_S, END)
    await note(db, *(reading(tenant, hour) for hour in hours))
    for hour in hours:
        await charge(db, due_ms(hour))
    async with db.read() as conn:
        assert await invoices.due_tenants(conn, PERIOD) == [tenant]
    made = await invoices.close(db, tenant, "2025-10", now_ms=CLOSED_MS + 32 * 86_400_000, actor="system")
    assert made.subtotal == 3 * RATES[0]
    async with db.read() as conn:
        assert await invoices.due_tenants(conn, PERIOD) == [], "a close would have nothing to invoice"
    billed = {None: 0, made.number: 0}
    for start, end in ((START, END), (END, bounds("2025-10")[1])):
        async for page in focus.rows(db, start, end):
            for row in (dict(zip(focus.COLUMNS, one, strict=True)) for one in page):
                billed[row["InvoiceId"]] += int(row["BilledCost"] * 10**6)
    assert billed == {None: 0, made.number: made.terms.amounts.due}


async def test_a_check_of_all_charges_lets_others_run(db, tenant, monkeypatch):
    """It reads them in parts, and others have their turns between them."""
    async with db.write() as conn:
        values = {"tenant_id": tenant, "model": "m", "price_version": "standard@2", "currency": "USD", "attempt": 0}
        values |= {"cache": 0, "pinned": 0, "charge_cache": 0, "charge_pinned": 0, "posted_at_ms": 1}
        rows = [{**values, "request_id": f"kept_{number}", "hour": START + number * HOUR_S} for number in range(6_001)]
        await conn.execute(insert(ResidencyCharge), rows)
    turns, seen, priced = 0, set(), pricing.residency_charge

    async def take_turns():
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    def charge_of(*kept):
        seen.add(turns)
        return priced(*kept)

    monkeypatch.setattr(pricing, "residency_charge", charge_of)
    async with db.read() as conn:
        others = asyncio.create_task(take_turns())
        assert await residency_sums.wrong(conn) == (6_001, [])
        others.cancel()
    assert len(seen) >= 4
