"""Price sheets in the console: versions, what changed, the editor with its preview, and who pays by which sheet."""

from __future__ import annotations

import time
from urllib.parse import quote

import pytest
import pytest_asyncio
from console_pages import signed_in
from console_world import USAGE, spend
from gateways import MODEL, PEPPER

from accounting.access import api_keys
from accounting.prices import pricing, rerating
from accounting.values import periods
from accounting.values.types import OPERATOR_TENANT, Rates
from gateway.base.app_keys import DATABASE
from gateway.console.formats import money

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROBE = "<script>alert(1)</script>\"'"


@pytest_asyncio.fixture(loop_scope="module")
async def operator(shared_gateway):
    async with signed_in(shared_gateway, shared_gateway.keys.admin_key) as browser:
        yield browser


async def test_the_next_version_is_made_from_the_current_one_and_shows_what_changed(operator, shared_gateway):
    form = {"sheet": "gold", "currency": "USD", "start": "2026-01-01T00:00", "residency": "m,0.5,1.5"}
    form |= {"rates": "m,interactive,0.01,0.10,0.10,0.40\nm,batch,0,0,0,0.2", "action": "create"}
    await operator.get("/prices/edit")
    unsure = await operator.submit("/prices/edit", **form)
    assert unsure.status == 400
    assert "m,batch,0,0,0,0.2" in unsure.text
    made = await operator.submit("/prices/edit", **form, is_sure="yes")
    assert made.path.startswith("/console/prices/gold/1")
    assert f"{MODEL} (interactive)" in made.words  # a served model has no price in it
    editor = await operator.get("/prices/edit?like=gold@1")
    assert "Create the version" not in editor.words
    later = form | {"rates": "m,interactive,0.01,0.10,0.10,0.60", "residency": "m,0.5,2", "start": "2026-02-01T00:00"}
    seen = await operator.submit("/prices/edit", **(later | {"action": "preview"}))
    assert (
        "The version holds from 2026-02-01 00:00:00 . gold@1 holds from 2026-01-01 00:00:00 until then." in seen.words
    )
    for changed in (
        "m interactive output 0.400000 USD 0.600000 USD 50.0 %",
        "m batch output 0.200000 USD – –",
        "m – kept KV, pinned 1.500000 USD 2.000000 USD 33.3 %",
    ):
        assert changed in seen.words, changed
    assert "interactive uncached" not in seen.words
    await operator.get("/prices/edit?like=gold@1")
    assert "m,interactive,0.01,0.10,0.10,0.40" in editor.text
    assert "m,0.50,1.50" in editor.text
    form |= {"rates": "m,interactive,0.01,0.10,0.10,0.80", "start": "2026-02-01T00:00", "is_sure": "yes"}
    made = await operator.submit("/prices/edit", **form)
    assert "Changed since gold@1" in made.words
    assert "0.400000 USD 0.800000 USD 100.0 %" in made.words
    csv = await operator.get("/prices/gold/2?table=changes&format=csv")
    assert '"m","batch","output",200000,"",""' in csv.text
    listed = await operator.get("/prices")
    assert "gold@2" in listed.words
    assert 'href="/console/prices"' in listed.text
    assert (await operator.get("/prices/gold/9")).status == 404
    assert (await operator.get("/prices/gold/2?against=x")).status == 404


async def test_a_preview_prices_the_last_days_by_the_new_rates_and_writes_nothing(operator, shared_gateway):
    tenant, _ = await shared_gateway.new_tenant("previewed")
    charge = await spend(shared_gateway, tenant) + await spend(shared_gateway, tenant, days_ago=5)
    await spend(shared_gateway, tenant, days_ago=8)
    batch = await spend(shared_gateway, tenant, tier="batch")
    before = await shared_gateway.sql("SELECT count(*) FROM price_sheet_version")
    await operator.get("/prices/edit?like=standard@1")
    rates = f"{MODEL},interactive,0.02,0.2,0.2,0.8"
    page = await operator.submit("/prices/edit", sheet="standard", start="", rates=rates, action="preview")
    new = pricing.charge(USAGE, Rates(20_000, 200_000, 200_000, 800_000)).total
    assert 2 * new == 2 * charge
    assert f"{money(charge, 'USD')} {money(2 * new, 'USD')} {money(2 * new - charge, 'USD')}" in page.words
    assert f"{money(batch, 'USD')} –" in page.words
    # What changes, rate by rate, with the moment; the form that creates it is there once this was seen.
    assert "Changed since standard@1" in page.words
    assert "The version holds from the moment on at which it is created." in page.words
    assert f"{MODEL} batch output" in page.words
    assert "Create the version" in page.words
    assert "its requests would be refused" in page.words
    assert await shared_gateway.sql("SELECT count(*) FROM price_sheet_version") == before


async def test_a_month_by_other_prices_is_what_rerate_says_and_writes_nothing(operator, shared_gateway):
    """The month is one in which nobody else spent anything. Half of the second tenant's usage has no price."""
    days_ago = 400
    (one, _), (two, _) = [await shared_gateway.new_tenant(name) for name in ("first payer", "second payer")]
    charges = [await spend(shared_gateway, one, days_ago), await spend(shared_gateway, two, days_ago)]
    unpriced = await spend(shared_gateway, two, days_ago, tier="batch")
    period = periods.period_of(int(time.time()) - days_ago * periods.DAY_S)
    rates = {"model": MODEL, "tier": "interactive", "cache_read": 1, "cache_write": 333_333, "uncached": 7, "output": 9}
    async with shared_gateway.session(shared_gateway.keys.admin_key) as admin:
        await admin.post("/admin/v1/price-sheets", json={"sheet": "silver", "rates": [rates]})
    before = await shared_gateway.sql("SELECT (SELECT count(*) FROM ledger_entry), (SELECT count(*) FROM price_rate)")
    async with shared_gateway.app[DATABASE].read() as conn:
        lines = await rerating.rerate(conn, period, "silver@1", one)
    new = sum(line.rerated for line in lines)
    assert charges[0] == sum(line.charged for line in lines) != new
    page = await operator.get(f"/prices/month?period={period}&sheet=silver@1")
    assert page.status == 200
    row = f"first payer 1 0 {money(charges[0], 'USD')} {money(new, 'USD')} {money(new - charges[0], 'USD')} USD {one}"
    assert row in page.words
    was = charges[1] + unpriced
    assert f"second payer 2 1 {money(was, 'USD')} {money(new, 'USD')} {money(new - was, 'USD')} USD {two}" in page.words
    assert f"{money(unpriced, 'USD')} – – USD" in page.words
    assert "would have been refused" in page.words
    csv = await operator.get(f"/prices/month?period={period}&sheet=silver@1&project_id={one}&format=csv")
    assert csv.text.splitlines()[1:] == [f'"first payer",1,0,{charges[0]},{new},{new - charges[0]},"USD","{one}"']
    doubled = await operator.get(f"/prices/month?period={period}&sheet=silver@1&change_percent=100&format=csv")
    twice = pricing.charge(USAGE, Rates(2, 666_666, 14, 18)).total
    assert f",{charges[0]},{twice},{twice - charges[0]}," in doubled.text
    async with shared_gateway.session(shared_gateway.keys.admin_key) as admin:
        path = f"/admin/v1/price-sheets/silver/1/month?period={period}&limit=1"
        first = await (await admin.get(path)).json()
        second = await (await admin.get(f"{path}&after={first['last_id']}")).json()
    assert [first["has_more"], second["has_more"]] == [True, False]
    assert {first["data"][0]["project_id"], second["data"][0]["project_id"]} == {one, two}
    after = await shared_gateway.sql("SELECT (SELECT count(*) FROM ledger_entry), (SELECT count(*) FROM price_rate)")
    assert after == before


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("period=soon&sheet=standard@1", "A period is a month"),
        ("period=2026-10&sheet=standard", "such as standard@1"),
        ("period=2026-10&sheet=standard@99", "There is no version"),
        ("period=2026-10&sheet=standard@1&change_percent=101", "between -100 and 100"),
        (f"period=2026-10&sheet={quote(PROBE)}@1", "There is no version"),
    ],
)
async def test_a_month_that_cannot_be_priced_is_refused(operator, query, sentence):
    page = await operator.get(f"/prices/month?{query}")
    assert page.status == 400
    assert sentence in page.words
    assert "<script>alert" not in page.text


async def test_a_tenant_is_assigned_a_sheet_from_a_moment_on(operator, shared_gateway):
    tenant, _ = await shared_gateway.new_tenant("assigned")
    await operator.get("/prices")
    page = await operator.submit("/prices/assign", tenant_id=tenant, sheet="standard", start="2027-01-01T00:00")
    assert "pays by its new sheet" in page.words
    csv = await operator.get(f"/prices?tenant_id={tenant}&table=assignments&format=csv")
    assert '"standard",1798761600,""' in csv.text
    await operator.get("/prices")
    for fields in ({"tenant_id": tenant, "sheet": PROBE}, {"tenant_id": f"{PROBE}/../x", "sheet": "standard"}):
        page = await operator.submit("/prices/assign", **fields)
        assert page.status == 400
        assert "<script>alert" not in page.text


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"rates": "m,weekly,1,1,1,1"}, "rates[0].tier"),
        ({"rates": "m,batch,1,1,1"}, "Line 1 has 5 values"),
        ({"rates": PROBE}, "Line 1"),
        ({"sheet": PROBE}, "sheet"),
        ({"sheet": "a@b"}, "sheet"),
        ({"start": "soon"}, "A time is written like"),
        ({"currency": PROBE}, "currency"),
        ({"rates": "m,batch,1,1,1,1\nm,batch,1,1,1,1"}, "A model and tier has one set of rates."),
    ],
)
async def test_what_cannot_be_is_refused_and_stays_in_the_form(operator, change, sentence):
    form = {"sheet": "gold", "currency": "USD", "rates": "m,batch,1,1,1,1", "action": "create", "is_sure": "yes"}
    await operator.get("/prices/edit")
    page = await operator.submit("/prices/edit", **(form | change))
    assert page.status == 400
    assert sentence in page.words
    assert "<script>alert" not in page.text


async def test_a_tenant_sees_no_prices_and_finance_changes_none(shared_gateway):
    async with signed_in(shared_gateway) as browser:
        page = await browser.get("/prices")
        assert "may not do this" in page.words
        assert 'href="/console/prices"' not in page.text
        for path in ("/prices/standard/1", "/prices/month", "/prices/month?period=2026-10&sheet=standard@1"):
            assert "may not do this" in (await browser.get(path)).words
    async with shared_gateway.app[DATABASE].write() as conn:
        finance = await api_keys.create(
            conn, PEPPER, tenant_id=OPERATOR_TENANT, now=int(time.time()), kind="admin", scopes=["admin:read"]
        )
    async with signed_in(shared_gateway, finance.value) as browser:
        assert (await browser.get("/prices/month?period=2026-10&sheet=standard@1")).status == 200
