"""Bills that can be sent: invoice, ledger, FOCUS and CSV agree to the smallest unit, and the XML keeps the official
rules.
"""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from decimal import Decimal

import bills_world as world
import pytest
from billing_world import CLOSED_MS, END, START
from en16931 import broken_rules
from money import posting
from sqlalchemy import func, select

from accounting.billing import invoices, payments, voids
from accounting.books import books
from accounting.exports import focus
from accounting.lifecycle import erasure, tenant_status
from accounting.prices import prices, pricing
from accounting.requests import request_postings
from accounting.tables.models import LedgerEntry, LedgerLeg
from accounting.terms import amounts, profiles
from accounting.values.errors import ConflictError, InvalidError
from accounting.values.types import Rates, Usage
from gateway.billing import einvoice
from gateway.billing.document import document
from gateway.billing.render import RENDERERS
from gateway.schema.money import in_units

LATER_MS = CLOSED_MS + 86_400_000
RULES = {
    "standard": ("EUR", {}),
    "exempt": ("EUR", {"tax": "exempt", "tax_reason": "Education, section 4 no. 21 UStG"}),
    "zero": ("USD", {"tax": "zero"}),
    "reverse_charge": ("USD", {"tax": "reverse_charge", "vat_number": "FR40303265045", "country": "FR"}),
    "intra_community": ("EUR", {"tax": "intra_community", "vat_number": "ATU13585627", "country": "AT"}),
    "export": ("JPY", {"tax": "export", "country": "JP"}),
    "not_subject": ("USD", {"tax": "not_subject", "country": "US"}),
}
UNITS = {"EUR": 10_000, "USD": 10_000, "JPY": 1_000_000}
"""The smallest amount that can be paid, in micro-units: a cent, or a whole yen."""


async def assert_books(db):
    async with db.read() as conn:
        report = await books.verify(conn)
    assert {e.id: e.failures for e in report.equations if not e.ok} == {}


async def focus_sums(db, start=START, end=2**40):
    """What is billed by each document, in micro-units of each currency."""
    sums = defaultdict(int)
    async for page in focus.rows(db, start, end):
        for row in page:
            row = dict(zip(focus.COLUMNS, row, strict=True))
            sums[(row["InvoiceId"], row["BillingCurrency"])] += int(row["BilledCost"] * 10**6)
    return dict(sums)


def csv_sum(info):
    records = csv.DictReader(io.StringIO(RENDERERS["text/csv"](info, None).decode()))
    return int(sum(Decimal(record["amount"]) for record in records) * 10**6)


async def test_a_month_of_three_tenants_in_three_currencies_agrees_to_the_smallest_unit(db):
    await world.issuer(db)
    euro = await world.tenant(db, "Müller & Söhne", "EUR", country="DE", street="Gasse 2", city="Köln")
    dollar = await world.tenant(db, "Crédit Été", "USD", **RULES["reverse_charge"][1])
    yen = await world.tenant(db, "東京計算", "JPY", country="DE")
    await world.credit(db, yen, 1_500_001, currency="JPY", note="half a yen and a bit")
    await world.credit(db, euro, 1_234_567, currency="EUR", note="prepaid by bank")
    await world.credit(db, euro, 111_111, currency="EUR", source="promotion", note="welcome")
    made = [await world.close(db, euro), await world.close(db, dollar), await world.close(db, yen)]
    note = await world.credit(
        db, euro, 4_321, type="credit_note", corrects=f"req_{euro}_1", starts_at=None, currency="EUR"
    )
    async with db.read() as conn:
        made.append(await invoices.get(conn, note.number))
        receivable = dict(
            (
                await conn.execute(
                    select(LedgerLeg.unit, func.sum(LedgerLeg.amount))
                    .where(LedgerLeg.account == "tenant_receivable")
                    .group_by(LedgerLeg.unit)
                )
            ).all()
        )
    asked = defaultdict(int)
    for info in made:
        amounts = info.terms.amounts
        unit = UNITS[info.currency]
        assert amounts.due % unit == amounts.net % unit == amounts.tax % unit == 0
        assert csv_sum(info) == amounts.due
        assert broken_rules(einvoice.xml(info)) == []
        asked[info.currency] += amounts.due
    assert made[0].terms.amounts.tax > 0 == made[1].terms.amounts.tax
    assert made[2].terms.amounts.tax > 0 != made[2].terms.amounts.carried_out, "whole yen are not what was used"
    billed = await focus_sums(db)
    assert billed == {(info.number, info.currency): info.terms.amounts.due for info in made}
    assert billed[made[2].number, "JPY"] % 1_000_000 == 0 < billed[made[2].number, "JPY"]
    # The ledger has what was asked for, but for the remainder that is carried on.
    rest = {info.currency: info.terms.amounts.carried_out for info in made}
    assert {unit: int(amount) for unit, amount in receivable.items()} == {
        unit: asked[unit] + rest[unit] for unit in asked
    }
    await assert_books(db)


@pytest.mark.parametrize("rule", RULES)
async def test_every_rule_of_tax_keeps_the_official_rules(db, rule):
    await world.issuer(db)
    currency, profile = RULES[rule]
    customer = {"country": "DE", "purchase_order": "PO 4711", "buyer_reference": "cost center 7", **profile}
    owner = await world.tenant(db, "شركة الحوسبة السحابية", currency, **customer)
    info = await world.close(db, owner)
    xml = einvoice.xml(info)
    assert broken_rules(xml) == []
    assert "شركة الحوسبة السحابية".encode() in xml
    assert info.terms.amounts.due % UNITS[currency] == 0
    assert (info.terms.amounts.tax > 0) == (rule == "standard")


async def test_remainders_are_carried_until_they_are_a_unit(db):
    """Forty months of a third of a cent are thirteen cents."""
    from accounting.terms.amounts import of_document

    carried, asked = 0, 0
    for _ in range(40):
        made = of_document(3_333, 0, carried, unit=10_000, tax_rate=0)
        asked += made.due
        carried = made.carried_out
        assert abs(carried) <= 5_000
    assert asked + carried == 40 * 3_333
    assert asked == 130_000


@pytest.mark.parametrize("paid_share", [1, 2])
async def test_an_invoice_that_is_issued_again_asks_for_no_more_than_is_open(db, paid_share):
    await world.issuer(db)
    first = await world.close(db, await world.tenant(db, "acme", "EUR", country="DE"))
    due = first.terms.amounts.due
    paid = amounts.rounded(due // paid_share, 10_000)
    async with db.write() as conn:
        statement = {"reference": "s 1", "paid_at": None, "now_ms": LATER_MS, "actor": "key_admin"}
        await payments.pay(conn, first.number, paid, **statement)
        _, again = await voids.void(conn, first.number, reason="wrong name", now_ms=LATER_MS, actor="key_admin")
    doc = document(again)
    shown = [f"{in_units(amount, 2)} EUR" for amount in (due, -paid, due - paid)]
    assert doc.totals[-3:] == list(zip(("Amount due", "Paid or credited before", "Open"), shown, strict=True))
    assert bool(doc.payment) == (paid < due)
    xml = einvoice.xml(again)
    assert f"<ram:TotalPrepaidAmount>{Decimal(paid).scaleb(-6):.2f}<".encode() in xml
    assert f"<ram:DuePayableAmount>{Decimal(due - paid).scaleb(-6):.2f}<".encode() in xml
    assert broken_rules(xml) == []


async def test_a_void_invoice_is_issued_again_and_the_books_stay_true(db):
    await world.issuer(db)
    owner = await world.tenant(db, "acme", "EUR", country="DE")
    await world.credit(db, owner, 500_005, currency="EUR")
    first = await world.close(db, owner)
    async with db.write() as conn:
        await payments.pay(
            conn, first.number, 1_000_000, reference="s 1", paid_at=None, now_ms=LATER_MS, actor="key_admin"
        )
    async with db.write() as conn:
        changed = {"street": "Right Street 1", "tax": "exempt", "tax_reason": "school"}
        await profiles.change_customer(conn, owner, changed, now=2, actor="key_admin")
    async with db.write() as conn:
        note, again = await voids.void(conn, first.number, reason="wrong address", now_ms=LATER_MS, actor="key_admin")
    async with db.read() as conn:
        before = await invoices.get(conn, first.number)
    assert (before.standing.state, before.standing.replaced_by) == ("void", again.number)
    assert before.lines == first.lines == again.lines
    assert before.terms == first.terms
    assert (note.terms.amounts.due, note.terms.refers_to) == (-first.terms.amounts.due, first.number)
    assert (again.number, again.version, again.terms.customer.street) == ("INV-000002", 2, "Right Street 1")
    assert again.terms.amounts.tax == 0 < first.terms.amounts.tax
    assert again.standing.balance == again.terms.amounts.due - 1_000_000
    for info in (note, again):
        assert broken_rules(einvoice.xml(info)) == []
        assert csv_sum(info) == info.terms.amounts.due
    assert await focus_sums(db) == {(info.number, "EUR"): info.terms.amounts.due for info in (first, note, again)}
    async with db.read() as conn:
        charged = await conn.scalar(select(func.sum(LedgerEntry.charge)))
    assert charged == again.subtotal
    assert (await world.close(db, owner)).number == again.number
    with pytest.raises(ConflictError, match="void already"):
        async with db.write() as conn:
            await voids.void(conn, first.number, reason="x", now_ms=LATER_MS, actor="a")
    await assert_books(db)


async def erase(db, tenant_id, now=LATER_MS // 1000):
    async with db.write() as conn:
        await erasure.erase(conn, tenant_id, retention_days=0, now=now, actor="key_admin")


@pytest.mark.parametrize("way", ["close", "reset"])
async def test_a_tenant_is_erased_with_its_rule_of_tax_only_once_everything_is_billed(db, way):
    """It was billed under the issuer's own rule."""
    await world.issuer(db)
    owner = await world.tenant(db, "acme", "EUR", **RULES["reverse_charge"][1])
    async with db.write() as conn:
        await tenant_status.archive(conn, owner, now=CLOSED_MS // 1000)
    with pytest.raises(ConflictError, match="close its months first"):
        await erase(db, owner)
    with pytest.raises(ConflictError, match="close its months first"):
        await erasure.delete_request_log(db, owner, retention_days=0, now=LATER_MS // 1000)
    if way == "close":
        assert (await world.close(db, owner)).terms.amounts.tax == 0
    else:
        async with db.write() as conn:
            nothing = dict.fromkeys(RULES["reverse_charge"][1])
            await profiles.change_customer(conn, owner, nothing, now=2, actor="key_admin")
    await erase(db, owner)


async def test_a_void_invoice_of_an_erased_tenant_is_issued_again_with_its_own_copy(db):
    await world.issuer(db)
    owner = await world.tenant(db, "acme", "EUR", **RULES["reverse_charge"][1])
    first = await world.close(db, owner)
    async with db.write() as conn:
        await tenant_status.archive(conn, owner, now=CLOSED_MS // 1000)
    await erase(db, owner)
    async with db.write() as conn:
        _, again = await voids.void(conn, first.number, reason="wrong lines", now_ms=LATER_MS, actor="key_admin")
    assert (again.terms.customer, again.terms.rule) == (first.terms.customer, first.terms.rule)
    assert (again.terms.amounts.tax, again.tenant_name) == (0, "acme")
    await assert_books(db)


async def test_a_payment_is_counted_once_and_never_too_much(db):
    await world.issuer(db)
    owner = await world.tenant(db, "acme", "EUR", country="DE")
    info = await world.close(db, owner)
    due = info.terms.amounts.due

    async def pay(amount, reference=""):
        async with db.write() as conn:
            return await payments.pay(
                conn, info.number, amount, reference=reference, paid_at=None, now_ms=LATER_MS, actor="key_admin"
            )

    part = await pay(10_000, "first")
    assert (part.standing.state, part.standing.balance) == ("open", due - 10_000)
    assert (await pay(10_000, "first")).standing == part.standing
    with pytest.raises(ConflictError, match="another payment"):
        await pay(20_000, "first")
    with pytest.raises(ConflictError, match="less than that"):
        await pay(due)
    with pytest.raises(InvalidError, match="can be paid"):
        await pay(1)
    assert (await pay(None)).standing.state == "paid"
    with pytest.raises(ConflictError, match="is paid"):
        await pay(None)
    await assert_books(db)


async def test_prefixes_count_by_themselves_without_a_gap(db):
    await world.issuer(db, invoice_prefix="EX-")
    own = [await world.tenant(db, f"own {n}", "EUR", invoice_prefix="ACME-2026-") for n in range(2)]
    plain = await world.tenant(db, "plain", "EUR")
    made = [(await world.close(db, owner)).number for owner in (own[0], plain, own[1])]
    assert made == ["ACME-2026-000001", "EX-000001", "ACME-2026-000002"]
    await assert_books(db)


async def test_a_preview_is_what_the_close_makes(db):
    await world.issuer(db)
    owner = await world.tenant(db, "acme", "EUR", country="DE")
    await world.credit(db, owner, 500_005, currency="EUR")
    async with db.read() as conn:
        seen = await invoices.preview(conn, owner, "2025-09", now_ms=CLOSED_MS)
    made = await world.close(db, owner)
    assert (seen.lines, seen.terms, seen.total) == (made.lines, made.terms, made.total)
    assert (seen.number, seen.standing.state) == ("DRAFT", "draft")
    async with db.read() as conn:
        with pytest.raises(ConflictError, match="is closed"):
            await invoices.preview(conn, owner, "2025-09", now_ms=CLOSED_MS)


async def test_a_closed_invoice_keeps_the_profiles_it_was_issued_with(db):
    await world.issuer(db)
    owner = await world.tenant(db, "acme", "EUR", country="DE", street="Old Street")
    made = await world.close(db, owner)
    await world.issuer(db, name="Other Name Ltd", tax_rate=70_000)
    async with db.read() as conn:
        assert await invoices.get(conn, made.number) == made
    assert made.issuer == made.terms.issuer.name == "Beispiel Rechenzentrum GmbH"


async def test_what_the_standard_lacks_is_named_with_what_to_do(db):
    owner = await world.tenant(db, "acme", "EUR")
    info = await world.close(db, owner)
    with pytest.raises(einvoice.IncompleteError, match=r"the issuer's country.*headgate issuer set"):
        einvoice.xml(info)
    assert RENDERERS["application/pdf"](info, None).startswith(b"%PDF-")


async def test_focus_of_a_tenant_in_euros_has_list_prices_in_euros(db):
    """M1: the default sheet is in dollars, so the contract's own rates are the list."""
    async with db.write() as conn:
        await prices.create_sheet(conn, prices.DEFAULT_SHEET, "USD", 1)
        await prices.add_version(conn, prices.DEFAULT_SHEET, {("m", "interactive"): Rates(9, 9, 9, 9)}, 1000)
    await world.tenant(db, "acme", "EUR")
    rows = [dict(zip(focus.COLUMNS, row, strict=True)) async for page in focus.rows(db, START, END) for row in page]
    assert {row["PricingCurrency"] for row in rows} == {"EUR"}
    assert all(row["ListUnitPrice"] == row["ContractedUnitPrice"] for row in rows)


async def test_focus_has_the_list_cost_of_a_day_that_no_request_could_have(db):
    """The export ended with an error at it."""
    usage = Usage(0, 0, 0, 10**10)
    async with db.write() as conn:
        await prices.create_sheet(conn, prices.DEFAULT_SHEET, "USD", 1)
        dear = Rates(0, 0, 0, pricing.MAX_RATE)
        await prices.add_version(conn, prices.DEFAULT_SHEET, {("m", "interactive"): dear}, 1000)
        cheap = posting("req_1", usage, price_version="own@1", opened_at_ms=START * 1000)
        await request_postings.post(conn, 0, 1, [cheap])
    [row] = [dict(zip(focus.COLUMNS, row, strict=True)) async for page in focus.rows(db, START, END) for row in page]
    assert row["ListCost"] == 10**10


async def test_focus_names_the_issuer_of_the_invoice_and_not_of_the_shell(db, monkeypatch):
    """M2: who exports does not matter."""
    monkeypatch.setenv("HEADGATE_INVOICE_ISSUER", "Somebody Else")
    await world.issuer(db)
    owner = await world.tenant(db, "acme", "EUR")
    await world.close(db, owner)
    await world.issuer(db, name="New Name Ltd")
    rows = [dict(zip(focus.COLUMNS, row, strict=True)) async for page in focus.rows(db, START, END) for row in page]
    assert {row["InvoiceIssuerName"] for row in rows} == {"Beispiel Rechenzentrum GmbH"}


async def test_focus_leaves_out_a_document_that_is_issued_meanwhile(db):
    """The export ended with a KeyError."""
    await world.issuer(db)
    owner = await world.tenant(db, "acme", "EUR")
    pages = focus.rows(db, START, END)
    rows = list(await anext(pages))
    await world.close(db, owner)
    rows += [row async for page in pages for row in page]
    assert {row[focus.COLUMNS.index("InvoiceId")] for row in rows} == {None}


async def test_rerating_adds_no_two_currencies(db):
    """M3: a sheet prices what was charged in its own currency, and nothing else."""
    from accounting.prices import rerating

    euro = await world.tenant(db, "euro", "EUR")
    dollar = await world.tenant(db, "dollar", "USD")
    async with db.read() as conn:
        lines = await rerating.rerate(conn, "2025-09", f"sheet-{euro[-12:]}", euro)
        assert {line.currency for line in lines} == {"EUR"}
        with pytest.raises(InvalidError, match=r"is in EUR, and proj_.* was charged in USD"):
            await rerating.rerate(conn, "2025-09", f"sheet-{euro[-12:]}", dollar)


async def test_the_official_rules_see_a_wrong_sum(db):
    """The check of the XML is one that can fail."""
    await world.issuer(db)
    info = await world.close(db, await world.tenant(db, "acme", "EUR", country="DE"))
    xml = einvoice.xml(info)
    due = f"{Decimal(info.terms.amounts.due).scaleb(-6):.2f}".encode()
    wrong = xml.replace(b"<ram:DuePayableAmount>" + due, b"<ram:DuePayableAmount>99999.99")
    assert wrong != xml
    assert any("BR-CO-16" in rule for rule in broken_rules(wrong))


async def test_a_tampered_remainder_is_named_by_verify_books(db):
    """I19: a document that carries on what its rounding did not leave over is found."""
    from sqlalchemy import text

    from accounting.books import books_documents

    owner = await world.tenant(db, "acme", "EUR")
    info = await world.close(db, owner)
    async with db.write() as conn:
        if conn.dialect.name == "sqlite":
            await conn.execute(text("DROP TRIGGER invoice_terms_no_update"))
        else:
            await conn.execute(text("ALTER TABLE invoice_terms DISABLE TRIGGER invoice_terms_no_update"))
        await conn.execute(text("UPDATE invoice_terms SET carried_out = carried_out + 1"))
        assert (await books_documents.rounding(conn)).failures == (info.number,)
        # One that got what no document carried on breaks the chain. The name of it has an amount as people read it.
        await conn.execute(
            text("UPDATE invoice_terms SET carried_out = carried_out - 1 + 7, carried_in = carried_in + 7")
        )
        nowhere = f"remainders of {owner}: {(info.terms.amounts.carried_in + 7) / 10**6:.6f} EUR from nowhere"
        assert (await books_documents.rounding(conn)).failures == (nowhere,)
