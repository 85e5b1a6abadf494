"""Usage and cost: the sums of the API as bars and tables, by day, hour and minute."""

from __future__ import annotations

import csv
import io
import re
import time

import pytest
from console_pages import signed_in
from console_world import spend
from markupsafe import Markup

from accounting.billing import reports
from gateway.console import choices, pages, spans, tables
from gateway.console.formats import amount, money
from gateway.console.screens.money import usage

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROBE = "<script>alert(1)</script>%22'"


async def test_a_day_its_hours_and_its_minutes_cost_the_same(shared_gateway):
    tenant, key = await shared_gateway.new_tenant("user")
    charge = await spend(shared_gateway, tenant) + await spend(shared_gateway, tenant, tier="batch")
    now = int(time.time())
    async with signed_in(shared_gateway, key) as browser:
        for width in ("day", "hour", "minute"):
            start = spans.written(now - 3600 if width != "day" else now - 86_400)
            page = await browser.get(f"/usage?width={width}&start={start}&end={spans.written(now + 120)}")
            assert f"Cost {money(charge, 'USD')}" in page.words, width
            assert "Requests 2" in page.words
        by_tier = await browser.get("/usage?group=tier&measure=tokens&format=csv")
        assert '"batch",1,6000000,1000000,2000000,500000' in by_tier.text
        batch = await browser.get("/usage?tier=batch&format=csv")
        assert batch.text.splitlines()[1].startswith("1,6000000,1000000,2000000,500000,")
        by_time = await browser.get("/usage?table=usage-by-time&format=csv")
        assert f'"{time.strftime("%Y-%m-%d", time.gmtime(now))}",2,' in by_time.text


async def test_a_bar_leads_to_finer_bars_and_a_minute_to_its_requests(shared_gateway):
    _, key = await shared_gateway.new_tenant("clicker")
    async with signed_in(shared_gateway, key) as browser:
        day = await browser.get("/usage?start=2026-11-01&end=2026-11-02&model=m")
        assert "start=2026-11-01T00:00&amp;end=2026-11-02T00:00&amp;model=m&amp;width=hour" in day.text
        assert "model=m" in day.text
        minute = await browser.get("/usage?width=minute&start=2026-11-01T10:00&end=2026-11-01T10:01&model=m&tier=batch")
        assert (
            "/console/requests?model=m&amp;service_tier=batch&amp;from=2026-11-01T10:00&amp;until=2026-11-01T10:01"
            in minute.text
        )
        assert "Nothing was used in this time." in day.words


async def test_a_tenant_cannot_see_another_ones_usage(shared_gateway):
    rich, _ = await shared_gateway.new_tenant("rich")
    await spend(shared_gateway, rich)
    _, key = await shared_gateway.new_tenant("curious")
    async with signed_in(shared_gateway, key) as browser:
        page = await browser.get(f"/usage?project_id={rich}&measure=tokens")
        assert "Requests 0" in page.words
        assert (await browser.get("/usage?group=tenant")).status == 400
    async with signed_in(shared_gateway, shared_gateway.keys.admin_key) as browser:
        page = await browser.get(f"/usage?group=tenant&project_id={rich}")
        assert "Requests 1" in page.words
        assert "rich" in page.words


async def test_each_currency_has_a_sum_of_its_own(shared_gateway):
    tenants = {"USD": (await shared_gateway.new_tenant("pays dollars"))[0]}
    tenants |= {"JPY": (await shared_gateway.new_tenant("pays yen"))[0]}
    charge = await spend(shared_gateway, tenants["USD"], days_ago=300) + await spend(
        shared_gateway, tenants["USD"], days_ago=299
    )
    yen = await spend(shared_gateway, tenants["JPY"], days_ago=300, currency="JPY")
    now = int(time.time())
    span = f"start={spans.written(now - 301 * 86_400)}&end={spans.written(now - 298 * 86_400)}"
    async with signed_in(shared_gateway, shared_gateway.keys.admin_key) as operator:
        page = await operator.get(f"/usage?group=tenant&{span}")
        shown = [Markup(amount(*one)).striptags() for one in ((yen, "JPY"), (charge, "USD"))]
        assert f"Cost {shown[0]} Cost {shown[1]}" in page.words
        for each in (money(charge, "USD"), money(yen, "JPY")):
            assert len(re.findall(rf"Sum [^S]*?{re.escape(each)}", page.words)) == 2, "a row below each table"
        assert money(charge + yen, "USD") not in page.words
        assert "Cost by day, JPY" in page.words
        file = await operator.get(f"/usage?group=tenant&{span}&format=csv")
        rows = list(csv.DictReader(io.StringIO(file.text)))
        assert {(row["group"], row["cost"], row["currency"]) for row in rows} == {
            (tenants["USD"], str(charge), "USD"),
            (tenants["JPY"], str(yen), "JPY"),
        }
        # Whatever the rows are, requests and tokens stand with the currency that they were charged in.
        counts = {"USD": 2, "JPY": 1}
        for query in ("group=", "group=model", "group=tier", "table=usage-by-time", "group=tier&table=usage-by-time"):
            file = await operator.get(f"/usage?{query}&{span}&format=csv")
            found = dict.fromkeys(counts, (0, 0))
            for row in csv.DictReader(io.StringIO(file.text)):
                requests, output = found[row["currency"]]
                found[row["currency"]] = requests + int(row["requests"]), output + int(row["output"])
            assert found == {name: (number, 500_000 * number) for name, number in counts.items()}, query
        for currency, cost in (("USD", charge), ("JPY", yen)):
            row = f"Sum {counts[currency]} [0-9, ]*{re.escape(money(cost, currency))}"
            assert len(re.findall(row, page.words)) == 2, "a row below each table"


async def test_a_page_sums_up_several_pages_of_the_api_and_says_when_there_are_too_many(shared_gateway, monkeypatch):
    tenant, key = await shared_gateway.new_tenant("long report")
    charge = sum([await spend(shared_gateway, tenant, days_ago=200 + n) for n in range(3)])
    now = int(time.time())
    days = f"start={spans.written(now - 203 * 86_400)}&end={spans.written(now - 199 * 86_400)}"
    monkeypatch.setattr(reports, "MAX_RESULTS", 4, raising=False)
    async with signed_in(shared_gateway, key) as browser:
        page = await browser.get(f"/usage?{days}")
        assert f"Cost {Markup(amount(charge, 'USD')).striptags()}" in page.words
        assert "Requests 3" in page.words
        monkeypatch.setattr(usage, "MAX_PAGES", 2)
        page = await browser.get(f"/usage?{days}")
        assert page.status == 400
        assert "too many sums for one page" in page.words


async def test_a_large_page_is_rendered_off_the_loop_and_is_the_same(shared_gateway, monkeypatch):
    tenant, key = await shared_gateway.new_tenant("large page")
    for key_id in ("key_1", "key_2"):
        await spend(shared_gateway, tenant, key_id=key_id)
    async with signed_in(shared_gateway, key) as browser:
        small = await browser.get("/usage?group=key")
        monkeypatch.setattr(pages, "MAX_CELLS_INLINE", 0)
        large = await browser.get("/usage?group=key")
        assert (large.status, large.words) == (200, small.words)
        for name in ("content-type", "content-security-policy", "cache-control"):
            assert large.headers[name] == small.headers[name]
        monkeypatch.setattr(tables, "MAX_SHOWN_ROWS", 1)
        cut = await browser.get("/usage?group=key")
        assert "1 of 2 rows Export all rows" in cut.words
        file = await browser.get("/usage?group=key&format=csv")
        assert len(file.text.splitlines()) == 3


async def test_tenants_have_their_names_however_many_there_are(shared_gateway, monkeypatch):
    made = [(await shared_gateway.new_tenant(name))[0] for name in ("of old", "of late")]
    for tenant in made:
        await spend(shared_gateway, tenant)
    monkeypatch.setattr(choices, "MAX_TENANTS", 1)
    async with signed_in(shared_gateway, shared_gateway.keys.admin_key) as operator:
        page = await operator.get("/usage?group=tenant")
        for tenant, name in zip(made, ("of old", "of late"), strict=True):
            assert f"{tenant} {name}" in page.words


async def test_what_is_typed_stays_text_and_what_cannot_be_is_a_sentence(shared_gateway):
    async with signed_in(shared_gateway) as browser:
        for name in ("api_key_id", "model", "table", "currency"):
            page = await browser.get(f"/usage?{name}={PROBE}")
            assert (page.status, "<script>alert" in page.text) == (200, False), name
        for wrong in ("start=yesterday", "start=2026-01-01&end=2026-12-01", "group=x", "measure=x"):
            page = await browser.get(f"/usage?{wrong}")
            assert page.status == 400, wrong
            assert "<script>" not in page.text


async def test_costs_come_by_hour_and_by_minute(shared_gateway):
    tenant, key = await shared_gateway.new_tenant("hourly")
    charge = await spend(shared_gateway, tenant)
    now = int(time.time())
    async with shared_gateway.session(key) as session:
        for width, limit in (("1h", 2), ("1m", 120)):
            query = {"start_time": now - 3_600, "bucket_width": width, "limit": limit}
            async with session.get("/v1/organization/costs", params=query) as answer:
                found = await answer.json()
        amounts = [one["amount"]["value"] for bucket in found["data"] for one in bucket["results"]]
        assert amounts == [charge / 10**6]
