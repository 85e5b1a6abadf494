"""A month closes into invoices that are the ledger, the sums and the price sheets, to the micro-unit."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict

import msgspec
import pytest
from billing_world import CLOSED_MS, END, PERIOD, START, USAGE, month_of_traffic, tenants_with_keys
from money import posting, record
from sqlalchemy import event, func, insert, select, text
from sqlalchemy.engine import Engine

from accounting.billing import credits, invoices, summaries
from accounting.billing.credits import NewCredit
from accounting.books import books, books_billing
from accounting.exports import focus
from accounting.limits import spend_limits
from accounting.prices import prices, pricing, rerating
from accounting.requests import request_postings
from accounting.tables.invoice_models import InvoiceLine
from accounting.tables.models import LedgerEntry, RollupDay
from accounting.tenants import tenants
from accounting.values import clock, time_zones
from accounting.values.errors import ConflictError, KeyReusedError, NotFoundError
from accounting.values.periods import bounds
from accounting.values.types import OPERATOR_TENANT, TOKEN_CLASSES, Rates, Usage
from gateway.billing.document import document
from gateway.billing.render import RENDERERS

BILL = {"now_ms": CLOSED_MS, "actor": "key_admin"}


async def close(db, tenant, period=PERIOD, **changes):
    return await invoices.close(db, tenant, period, **{**BILL, **changes})


async def grant(db, tenant, amount, key, **fields):
    async with db.write() as conn:
        made, _ = await credits.create(
            conn,
            NewCredit(type="grant", tenant_id=tenant, amount=amount, **{"starts_at": START, **fields}),
            key=key,
            now_ms=START * 1000,
            actor="key_admin",
        )
    return made


async def assert_books(db):
    async with db.read() as conn:
        report = await books.verify(conn)
    assert {e.id: e.failures for e in report.equations if not e.ok} == {}


@pytest.mark.rest
async def test_a_month_of_twenty_tenants_closes_to_the_micro_unit(db):
    owners = await tenants_with_keys(db, 20)
    posted = await month_of_traffic(db, owners, 60)
    expected = defaultdict(int)
    async with db.read() as conn:
        for p in posted:
            rates = await prices.rates_of(conn, p.price_version, p.model, p.tier)
            expected[p.tenant_id] += pricing.charge(p.usage, rates).total
    made = [await close(db, tenant) for tenant, _ in owners]
    assert {i.tenant_id: i.total for i in made} == expected
    assert [i.number for i in made] == [f"INV-{n:06d}" for n in range(1, 21)]
    async with db.read() as conn:
        charged = await conn.scalar(select(func.sum(LedgerEntry.charge)))
        rolled_up = await conn.scalar(select(func.sum(RollupDay.charge)))
    assert sum(i.total for i in made) == charged == rolled_up
    for invoice in made:
        mine = [p for p in posted if p.tenant_id == invoice.tenant_id]
        assert sum(line.amount for line in invoice.lines) == invoice.total == sum(invoice.days)
        assert sum(line.num_requests for line in invoice.lines) == len(mine) == invoice.num_requests
        for name in TOKEN_CLASSES:
            tokens = sum(line.quantity for line in invoice.lines if line.token_class == name)
            assert tokens == sum(getattr(p.usage, name) for p in mine)
    # A tenant with a sheet of its own from the middle of the month pays by both.
    assert {line.price_version for line in made[0].lines} == {"standard@1", "own@1"}
    await assert_books(db)


@pytest.fixture
async def tenant(db):
    """One tenant with a month of traffic."""
    (owner,) = await tenants_with_keys(db, 1)
    await month_of_traffic(db, [owner], 40)
    return owner[0]


async def test_a_repeated_close_is_the_same_invoice_and_two_at_once_are_one(db, tenant):
    first, second = await asyncio.gather(close(db, tenant), close(db, tenant))
    assert first == second == await close(db, tenant, now_ms=CLOSED_MS + 10**9)
    async with db.read() as conn:
        assert (await invoices.list_invoices(conn, limit=9)).items[0].number == "INV-000001"
        assert await conn.scalar(text("SELECT count(*) FROM invoice")) == 1


async def test_a_close_reads_no_more_than_what_was_posted_meanwhile_while_writers_wait(db, tenant):
    reads = []

    def note(conn, cursor, statement, parameters, context, many) -> None:
        if "posted_at_ms >= " in statement:
            reads.append((statement, parameters))

    event.listen(Engine, "before_cursor_execute", note)
    try:
        await close(db, tenant)
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    [(statement, parameters)] = reads
    if db.dialect == "sqlite":  # PostgreSQL reads a table of a few rows as it is
        async with db.read() as conn:
            plan = [row[3] for row in await conn.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)]
        assert "SEARCH ledger_entry USING INDEX ix_ledger_entry_posted_at_ms (posted_at_ms>?)" in plan
        assert [line for line in plan if "ix_ledger_entry_tenant_id" in line] == []


async def test_a_month_of_an_adapter_that_pays_its_bases_price_closes(db):
    ((tenant, key),) = await tenants_with_keys(db, 1)
    rates = Rates(1_000, 2_000, 3_000, 4_000)
    async with db.write() as conn:
        version = await prices.add_version(conn, prices.DEFAULT_SHEET, {("base", "interactive"): rates}, 2000)
        charge = pricing.charge(USAGE, rates)
        owner = {"tenant_id": tenant, "key_id": key, "opened_at_ms": START * 1000, "price_version": version}
        paid = posting("req_x", USAGE, model="base:support", charge=charge, **owner)
        await request_postings.post(conn, 0, 1, [paid])
    made = await close(db, tenant)
    assert (made.total, {line.model for line in made.lines}) == (charge.total, {"base:support"})
    assert {line.token_class: line.rate for line in made.lines} == msgspec.structs.asdict(rates)
    async with db.read() as conn:
        lines = await rerating.rerate(conn, PERIOD, version)
    assert sum(line.rerated for line in lines) == charge.total


async def test_a_period_closes_48_hours_after_its_end(db, tenant):
    with pytest.raises(ConflictError, match="48 hours"):
        await close(db, tenant, now_ms=(END + 48 * 3600) * 1000 - 1)


async def test_what_comes_after_the_close_is_a_late_line_on_the_next_invoice(db, tenant):
    first = await close(db, tenant)
    key = first.tenant_id
    usage = Usage(10, 20, 30, 40)
    rates = prices.Rates(7, 13, 11, 17)
    async with db.write() as conn:
        for number, opened in enumerate((END - 10, END + 10)):
            await request_postings.post(
                conn,
                0,
                2 + number,
                [
                    posting(
                        f"req_late_{number}",
                        usage,
                        tenant_id=tenant,
                        key_id=key,
                        model="m",
                        price_version="own@1",
                        opened_at_ms=opened * 1000,
                        charge=pricing.charge(usage, rates),
                    )
                ],
                now_ms=CLOSED_MS - 5,
            )
    following = await close(db, tenant, "2025-10", now_ms=CLOSED_MS + 32 * 86_400_000)
    assert {line.period for line in following.lines} == {"2025-09", "2025-10"}
    assert following.num_requests == 2
    assert await close(db, tenant) == first
    async with db.read() as conn:
        charged = await conn.scalar(select(func.sum(LedgerEntry.charge)))
    assert charged == first.total + following.total


async def test_months_are_closed_in_their_order_and_an_empty_one_not_at_all(db, tenant):
    late = CLOSED_MS + 90 * 86_400_000
    with pytest.raises(ConflictError, match="2025-09 must be closed first"):
        await close(db, tenant, "2025-10", now_ms=late)
    await close(db, tenant)
    with pytest.raises(ConflictError, match="nothing to invoice"):
        await close(db, tenant, "2025-10", now_ms=late)


async def test_a_preview_names_the_open_month_before_it_and_a_month_to_come_has_none(db):
    """October's draft would have September's lines, and take its prepaid credit, once more."""
    (owner,) = await tenants_with_keys(db, 1)
    charges = [
        await settled(db, f"req_{n}", owner, "standard@1", at, CLOSED_MS - 1) for n, at in enumerate((START, END))
    ]
    await grant(db, owner[0], charges[0] + 1, "k1")
    october_ms = END * 1000 + 5
    async with db.read() as conn:
        with pytest.raises(ConflictError, match=r"2025-09 is still open.*preview 2025-09, or close it"):
            await invoices.preview(conn, owner[0], "2025-10", now_ms=october_ms)
        with pytest.raises(ConflictError, match="2025-11 has not begun"):
            await invoices.preview(conn, owner[0], "2025-11", now_ms=october_ms)
        first = await invoices.preview(conn, owner[0], PERIOD, now_ms=october_ms)
    await close(db, owner[0])
    async with db.read() as conn:
        second = await invoices.preview(conn, owner[0], "2025-10", now_ms=CLOSED_MS)
    assert [first.subtotal, second.subtotal, first.prepaid, second.prepaid] == [*charges, charges[0], 1]


@pytest.mark.parametrize(
    ("statement", "refusal"),
    [
        ("UPDATE rollup_month SET charge_output = charge_output + 1", "not the sums of its rows"),
        ("UPDATE rollup_month SET num_requests = num_requests - 1", "not the sums of its rows"),
    ],
)
async def test_a_close_that_is_off_by_one_is_refused(db, tenant, statement, refusal):
    async with db.write() as conn:
        await conn.execute(text(statement))
    with pytest.raises(ConflictError, match=refusal):
        await close(db, tenant)


async def test_a_charge_that_is_not_usage_times_price_refuses_the_close(db, tenant):
    wrong = pricing.Charge(2, 1, 1, 0, 0)
    async with db.write() as conn:
        await request_postings.post(
            conn,
            0,
            9,
            [
                posting(
                    "req_wrong",
                    Usage(1, 1, 1, 1),
                    tenant_id=tenant,
                    key_id="k",
                    opened_at_ms=START * 1000,
                    charge=wrong,
                )
            ],
        )
    with pytest.raises(ConflictError, match="req_wrong"):
        await close(db, tenant)


async def settled(db, request, owner, version, at_s, now_ms=None) -> int:
    """A request of model `m` with its engine record. Returns its charge."""
    tenant, key = owner
    async with db.write() as conn:
        charge = pricing.charge(USAGE, await prices.rates_of(conn, version, "m", "interactive"))
        times = {"opened_at_ms": at_s * 1000, "ended_at_ms": at_s * 1000 + 900}
        paid = posting(request, USAGE, tenant_id=tenant, key_id=key, price_version=version, charge=charge, **times)
        await request_postings.post(conn, 0, 1, [paid], now_ms=now_ms)
        await request_postings.post_engine_records(conn, [record(request, USAGE, tenant_id=tenant)], now_ms=now_ms)
    return charge.total


async def reverse(db, *requests):
    async with db.write() as conn:
        await request_postings.reverse(conn, requests, "sdk_retry")


def later_ms() -> int:
    """A time after that of postings by the clock."""
    return clock.now_ms() + 1_000


async def test_a_month_closes_with_a_reversed_request_alone_in_its_key(db):
    (owner,) = await tenants_with_keys(db, 1)
    middle = START + 15 * 86_400
    await settled(db, "req_1", owner, "standard@1", middle - 1)
    charge = await settled(db, "req_2", owner, "own@1", middle)
    await reverse(db, "req_1")
    made = await close(db, owner[0], now_ms=later_ms())
    assert (made.total, made.num_requests) == (charge, 1)
    assert {line.price_version for line in made.lines} == {"own@1"}
    await assert_books(db)


async def test_a_month_whose_only_request_was_reversed_does_not_block_the_next(db):
    (owner,) = await tenants_with_keys(db, 1)
    await settled(db, "req_1", owner, "own@1", END - 1)
    charge = await settled(db, "req_2", owner, "own@1", END)
    await reverse(db, "req_1")
    async with db.read() as conn:
        assert await invoices.due_tenants(conn, PERIOD) == []
        assert await invoices.due_tenants(conn, "2025-10") == [owner[0]]
    with pytest.raises(ConflictError, match="nothing to invoice"):
        await close(db, owner[0], now_ms=later_ms())
    made = await close(db, owner[0], "2025-10", now_ms=later_ms())
    assert (made.total, made.num_requests) == (charge, 1)
    await assert_books(db)


async def test_the_operator_who_fills_public_prefixes_gets_no_invoice(db):
    await tenants_with_keys(db, 1)
    await settled(db, "req_1", (OPERATOR_TENANT, "key_operator"), "standard@1", START)
    async with db.read() as conn:
        assert await invoices.due_tenants(conn, PERIOD) == []
        assert await summaries.top_tenants(conn, START, 9) == []
        assert await spend_limits.spent_by_all(conn, spend_limits.month(START * 1000), "USD") == 0
        with pytest.raises(NotFoundError):
            await invoices.preview(conn, OPERATOR_TENANT, PERIOD, now_ms=later_ms())
    with pytest.raises(NotFoundError):
        await close(db, OPERATOR_TENANT, now_ms=later_ms())
    await assert_books(db)


async def test_a_close_between_a_charge_and_its_reversal_does_not_block_the_month_after(db):
    """The month between has nothing to invoice. Its charge was posted before the last close, its reversal after it."""
    (owner,) = await tenants_with_keys(db, 1)
    charges = [await settled(db, "req_0", owner, "own@1", END - 1, CLOSED_MS - 2)]
    await settled(db, "req_1", owner, "own@1", END, CLOSED_MS - 1)
    first = await close(db, owner[0])
    charges.append(await settled(db, "req_2", owner, "own@1", bounds("2025-10")[1]))
    await reverse(db, "req_1")
    following = await close(db, owner[0], "2025-11", now_ms=later_ms())
    assert [first.total, following.total] == charges
    await assert_books(db)


async def test_usage_that_comes_late_to_a_month_without_an_invoice_is_invoiced_after_a_later_month(db):
    """The month lies between two closed ones. Usage of the later one that came after its close waits for the next."""
    (owner,) = await tenants_with_keys(db, 1)
    october, november = (bounds(period)[1] for period in ("2025-09", "2025-10"))
    charges = [await settled(db, "req_1", owner, "standard@1", START - 86_400)]
    charges.append(await settled(db, "req_2", owner, "own@1", october))
    closed = [await close(db, owner[0], period, now_ms=later_ms()) for period in ("2025-08", "2025-10")]
    charges.append(await settled(db, "req_late", owner, "own@1", END - 86_400))
    charges.append(await settled(db, "req_late_october", owner, "own@1", october))
    async with db.read() as conn:
        assert (await invoices.preview(conn, owner[0], PERIOD, now_ms=later_ms())).total == charges[2]
        assert await invoices.due_tenants(conn, PERIOD) == [owner[0]]
    closed.append(await close(db, owner[0], now_ms=later_ms()))
    await assert_books(db)
    charges.append(await settled(db, "req_3", owner, "own@1", november))
    closed.append(await close(db, owner[0], "2025-11", now_ms=later_ms()))
    assert [one.total for one in closed] == [*charges[:3], sum(charges[3:])]
    await assert_books(db)


async def due(db, period):
    """What would be closed by itself after that month, and the tenants whom a close of the month by hand takes."""
    async with db.read() as conn:
        return await invoices.due(conn, bounds(period)[1]), await invoices.due_tenants(conn, period)


async def test_late_usage_of_a_tenant_that_uses_nothing_more_is_on_the_invoice_of_the_next_month(db, tenant):
    """No later month had any usage, so that no close took it: it was charged and on no invoice."""
    first = await close(db, tenant)
    assert await due(db, "2025-10") == ([], [])
    charge = await settled(db, "req_late", (tenant, "key"), "standard@1", END - 10)
    assert (await due(db, PERIOD)) == ([], []), "its month is closed"
    assert await due(db, "2025-10") == ([("2025-10", tenant)], [tenant])
    assert await due(db, "2025-11") == ([("2025-11", tenant)], [tenant])
    made = await close(db, tenant, "2025-10", now_ms=later_ms())
    assert {(line.kind, line.period) for line in made.lines} == {("usage", PERIOD)}
    assert (made.total, made.num_requests, made.days) == (charge, 1, [0] * 31)
    assert await close(db, tenant) == first
    assert await due(db, "2025-11") == ([], [])


async def test_late_usage_waits_for_no_month_of_its_own_while_another_one_is_open(db):
    (owner,) = await tenants_with_keys(db, 1)
    charges = [await settled(db, "req_1", owner, "standard@1", START, CLOSED_MS - 1)]
    closed = [await close(db, owner[0])]
    charges.append(await settled(db, "req_late", owner, "own@1", END - 1))
    charges.append(await settled(db, "req_2", owner, "own@1", END))
    async with db.read() as conn:
        open_months = await invoices.due(conn, bounds("2025-11")[1])
    assert open_months == [("2025-10", owner[0])]
    closed.append(await close(db, owner[0], "2025-10", now_ms=later_ms()))
    assert await due(db, "2025-11") == ([], [])
    assert [one.total for one in closed] == [charges[0], sum(charges[1:])]
    await assert_books(db)


async def test_a_month_exported_again_after_the_next_close_has_what_its_late_usage_was_moved_by(db):
    """docs/billing.md says so: rows of the later month name the months whose exports are to be replaced."""
    (owner,) = await tenants_with_keys(db, 1)
    await settled(db, "req_1", owner, "standard@1", START, CLOSED_MS - 1)
    closed = [await close(db, owner[0])]
    before = await billed(db, PERIOD)
    late = await settled(db, "req_late", owner, "standard@1", END - 1)
    closed.append(await close(db, owner[0], "2025-10", now_ms=later_ms()))
    later = await billed(db, "2025-10")
    assert f"Usage of {PERIOD}, billed by {closed[1].number}" in {text for _, text in later}
    due = {one.number: one.terms.amounts.due for one in closed}
    assert by_invoice(await billed(db, PERIOD), later) == due
    assert by_invoice(before, later) == due | {closed[0].number: due[closed[0].number] - late}


async def billed(db, period):
    """The rows of an export of one month: their invoices, texts and amounts in micro-units."""
    at = [focus.COLUMNS.index(name) for name in ("InvoiceId", "ChargeDescription", "BilledCost")]
    found = Counter()
    async for page in focus.rows(db, *bounds(period)):
        for row in page:
            invoice, text, cost = (row[place] for place in at)
            found[invoice, text] += int(cost * 10**6)
    return found


def by_invoice(*exports):
    sums = Counter()
    for (invoice, _), amount in (row for export in exports for row in export.items()):
        sums[invoice] += amount
    return sums


async def test_what_is_taken_back_late_makes_no_invoice_by_itself(db):
    (owner,) = await tenants_with_keys(db, 1)
    await settled(db, "req_1", owner, "standard@1", START, CLOSED_MS - 1)
    await close(db, owner[0])
    await reverse(db, "req_1")
    assert await due(db, "2025-10") == ([], [])


async def test_an_invoiced_request_that_is_reversed_later_is_a_line_below_zero_on_the_next(db):
    (owner,) = await tenants_with_keys(db, 1)
    await settled(db, "req_1", owner, "standard@1", START, CLOSED_MS - 1)
    first = await close(db, owner[0])
    charge = await settled(db, "req_2", owner, "own@1", END)
    await reverse(db, "req_1")
    following = await close(db, owner[0], "2025-10", now_ms=later_ms())
    assert first.total + following.total == charge
    assert first.num_requests + following.num_requests == 1
    await assert_books(db)


async def test_grants_pay_by_priority_then_by_their_end_and_the_rest_is_due(db, tenant):
    await grant(db, tenant, 1_000, "k1", priority=2)
    await grant(db, tenant, 300, "k2", priority=1, expires_at=END + 86_400)
    await grant(db, tenant, 10**9, "k3", priority=2, expires_at=START + 5 * 86_400)
    await grant(db, tenant, 50, "k4", priority=1, starts_at=END + 1)
    made = await close(db, tenant)
    paid = {line.credit_id: -line.amount for line in made.lines if line.kind == "prepaid"}
    async with db.read() as conn:
        page = await credits.list_credits(conn, limit=9)
        left = {c.amount: c.remaining for c in page.items}
        first_days = sum(made.days[:5])
    assert made.prepaid == sum(paid.values()) == 300 + 1_000 + (first_days - 300)
    # What was left of the one that ended is gone; the one that starts later is whole.
    assert left == {1_000: 0, 300: 0, 10**9: 0, 50: 50}
    assert made.total == made.subtotal - made.prepaid
    await assert_books(db)


async def test_grants_never_pay_more_than_is_due(db, tenant):
    made = await grant(db, tenant, 10**12, "k1")
    invoice = await close(db, tenant)
    assert (invoice.total, invoice.prepaid) == (0, invoice.subtotal)
    async with db.read() as conn:
        assert (await credits.get(conn, made.id)).remaining == 10**12 - invoice.subtotal
    await assert_books(db)


async def correct(db, tenant, kind, amount, key, request, now_ms=CLOSED_MS + 1000):
    async with db.write() as conn:
        return await credits.create(
            conn,
            NewCredit(type=kind, tenant_id=tenant, amount=amount, corrects=request, note="slow"),
            key=key,
            now_ms=now_ms,
            actor="key_admin",
        )


async def a_charge(db) -> tuple[str, int]:
    async with db.read() as conn:
        query = select(LedgerEntry.request_id, LedgerEntry.charge).order_by(LedgerEntry.charge.desc())
        return (await conn.execute(query.limit(1))).one()


async def test_a_credit_note_points_at_its_row_and_leaves_the_invoice_alone(db, tenant):
    request, charge = await a_charge(db)
    with pytest.raises(ConflictError, match="no invoice yet"):
        await correct(db, tenant, "credit_note", 5, "k1", request)
    invoice = await close(db, tenant)
    note, _ = await correct(db, tenant, "credit_note", charge - 1, "k1", request)
    assert (note.number, note.corrects) == ("CN-000001", request)
    again, replayed = await correct(db, tenant, "credit_note", charge - 1, "k1", request)
    assert (again, replayed) == (note, True)
    with pytest.raises(KeyReusedError):
        await correct(db, tenant, "credit_note", 1, "k1", request)
    with pytest.raises(ConflictError, match=r"0\.000001 USD is left"):
        await correct(db, tenant, "credit_note", 2, "k2", request)
    with pytest.raises(NotFoundError):
        await correct(db, "operator", "credit_note", 1, "k3", request)
    async with db.read() as conn:
        document = await invoices.get(conn, note.number)
        assert document.total == -(charge - 1)
        after = await invoices.get(conn, invoice.number)
        assert msgspec.structs.replace(after, standing=invoice.standing) == invoice
    await assert_books(db)


async def test_a_charge_on_an_invoice_takes_no_adjustment_and_what_is_left_of_it_stands_in_its_currency(db, tenant):
    request, charge = await a_charge(db)
    await correct(db, tenant, "adjustment", charge - 3, "k1", request, now_ms=END * 1000 + 5)
    with pytest.raises(ConflictError, match=r"^Of this charge 0\.000003 USD is left to be corrected\.$"):
        await correct(db, tenant, "adjustment", 4, "k2", request, now_ms=END * 1000 + 5)
    invoice = await close(db, tenant)
    with pytest.raises(ConflictError, match=f"on the invoice {invoice.number}: correct it by a credit note"):
        await correct(db, tenant, "adjustment", 3, "k3", request)
    note, _ = await correct(db, tenant, "credit_note", 3, "k3", request)
    assert note.number == "CN-000001"
    again, is_replay = await correct(db, tenant, "adjustment", charge - 3, "k1", request)
    assert (again.amount, is_replay) == (charge - 3, True), "a repeat of what was given before the close is answered"
    await assert_books(db)


async def test_what_cost_nothing_has_no_charge_to_correct_and_what_nobody_knows_is_not_there(db, tenant):
    async with db.write() as conn:
        await request_postings.post(conn, 0, 99, [posting("req_free", kind="void", tenant_id=tenant)])
    with pytest.raises(ConflictError, match="there is no charge to correct"):
        await correct(db, tenant, "adjustment", 1, "k4", "req_free")
    with pytest.raises(NotFoundError):
        await correct(db, tenant, "adjustment", 1, "k5", "req_unknown")


async def test_a_credit_note_refers_to_the_invoice_that_has_the_charge_although_an_earlier_month_closed_last(db):
    ((tenant, key),) = await tenants_with_keys(db, 1)
    owner, october = (tenant, key), bounds("2025-09")[1]
    await settled(db, "req_1", owner, "standard@1", START - 86_400)
    await close(db, tenant, "2025-08", now_ms=later_ms())
    await settled(db, "req_late", owner, "standard@1", START - 86_400)
    await settled(db, "req_2", owner, "own@1", october)
    has_it = await close(db, tenant, "2025-10", now_ms=later_ms())
    await settled(db, "req_3", owner, "own@1", END - 86_400)
    await close(db, tenant, now_ms=later_ms())
    note, _ = await correct(db, tenant, "credit_note", 1, "k1", "req_late", now_ms=later_ms())
    async with db.read() as conn:
        assert (await invoices.get(conn, note.number)).terms.refers_to == has_it.number == "INV-000002"
    await assert_books(db)


async def named_by_i9(db, *statements) -> tuple[str, ...]:
    """What I9 names once the statements are executed, which are undone."""
    async with db.write() as conn:
        for statement in statements:
            await conn.execute(statement)
        named = (await books_billing.invoice_truth(conn)).failures
        await conn.rollback()
    return named


def line(number: str, place: int, kind: str, amount: int, credit_id: str | None = None):
    texts = dict.fromkeys(("model", "tier", "token_class", "price_version", "note"), "")
    counts = dict.fromkeys(("rate", "num_requests", "quantity"), 0)
    one = {"number": number, "line_no": 100 + place, "kind": kind, "period": PERIOD, "amount": amount}
    return insert(InvoiceLine).values(**texts, **counts, **one, credit_id=credit_id)


@pytest.mark.parametrize("kind", ["adjustment", "credit_note"])
async def test_a_correction_that_is_not_what_its_documents_say_is_named(db, tenant, kind):
    """The documents add up all the same."""
    request, charge = await a_charge(db)
    if kind == "credit_note":
        await close(db, tenant)
    made, _ = await correct(db, tenant, kind, charge - 1, "k1", request, now_ms=END * 1000 + 5)
    number = made.number or (await close(db, tenant)).number
    assert await named_by_i9(db) == ()
    other = line(number, 1, "usage", -5)
    assert await named_by_i9(db, line(number, 0, kind, 5, made.id), other) == (made.id,)
    assert await named_by_i9(db, line(number, 0, kind, charge - 1, made.id), line(number, 1, "usage", 1 - charge)) == (
        () if kind == "adjustment" else (made.id,)  # an adjustment may wait for its invoice
    )
    assert await named_by_i9(db, line(number, 0, kind, 5), other) == (number,)


async def test_an_invoice_that_no_grant_paid_although_it_says_so_is_named(db, tenant, monkeypatch):
    async def use(*_, **__) -> None:
        pass

    await grant(db, tenant, 500, "k1")
    monkeypatch.setattr(credits, "use", use)
    made = await close(db, tenant)
    assert made.prepaid == 500
    assert await named_by_i9(db) == (made.number,)


async def test_an_adjustment_is_on_the_next_invoice_once(db, tenant):
    request, charge = await a_charge(db)
    await correct(db, tenant, "adjustment", charge, "k1", request, now_ms=END * 1000 + 5)
    made = await close(db, tenant)
    (line,) = [line for line in made.lines if line.kind == "adjustment"]
    assert (line.amount, line.note) == (-charge, f"{request} slow")
    assert made.total == sum(made.days) - charge
    await assert_books(db)


async def test_an_invoice_shows_its_period_by_the_clocks_that_the_tenant_had_then(db):
    owners = await tenants_with_keys(db, 2)
    await month_of_traffic(db, owners, 5)
    (berlin, _), (utc, _) = owners
    async with db.write() as conn:
        await tenants.set_time_zone(conn, berlin, "Europe/Berlin", now=1)
    shown, plain = document(await close(db, berlin)), document(await close(db, utc))
    begins, ends = (time_zones.shown(second, "Europe/Berlin")[:16] for second in (START, END))
    local = ("Local time", f"{begins} to {ends} (Europe/Berlin)".replace("T", " "))
    assert [label for label, _ in shown.facts if label not in dict(plain.facts)] == ["Local time"]
    assert local in shown.facts
    async with db.write() as conn:
        await tenants.set_time_zone(conn, berlin, "Asia/Tokyo", now=2)
    again = document(await close(db, berlin))
    assert again == shown
    assert RENDERERS["text/html"](await close(db, berlin), None).count(b"Europe/Berlin") == 1
