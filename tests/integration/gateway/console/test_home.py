"""The first page: what was spent, its forecast, what the cache saved, failures and the nearest cap."""

from __future__ import annotations

import asyncio
import re
import time
from html import unescape

import pytest
from console_pages import signed_in
from console_world import KEPT_CHARGE, USAGE, keep_kv, spend
from gateways import MODEL, RunningGateway

from accounting.values.types import Limits
from gateway.console.formats import money

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROBE = "<script>alert(1)</script>\"'=cmd|' /C calc'!A0"


async def budget(gateway: RunningGateway, tenant_id: str, micro_units: int, **fields: object) -> str:
    body = {"project_id": tenant_id, "period": "month", "limit_micro_units": micro_units, **fields}
    async with gateway.session(gateway.keys.admin_key) as admin, admin.post("/admin/v1/budgets", json=body) as made:
        assert made.status == 200
        found: str = (await made.json())["id"]
        return found


async def summary(gateway: RunningGateway, key: str, path: str = "/v1/usage/summary") -> dict:
    async with gateway.session(key) as session, session.get(path) as answer:
        assert answer.status == 200, await answer.text()
        found: dict = await answer.json()
        return found


async def test_a_tenant_sees_its_own_spending_its_forecast_and_what_the_cache_saved(shared_gateway):
    tenant, key = await shared_gateway.new_tenant("saver")
    other, _ = await shared_gateway.new_tenant("stranger")
    charge = await spend(shared_gateway, tenant)
    assert await spend(shared_gateway, tenant, days_ago=3) == charge
    await spend(shared_gateway, other)
    found = await summary(shared_gateway, key)
    [spent] = found["spending"]
    assert spent["today_micro_units"] == charge
    assert spent["month_micro_units"] in (charge, 2 * charge)  # three days ago may be last month
    assert spent["days"][-1]["amount_micro_units"] == charge
    assert sum(day["amount_micro_units"] for day in spent["days"]) == 2 * charge
    forecast = spent["forecast"]
    assert forecast["num_days"] == 3
    assert forecast["low_micro_units"] <= forecast["expected_micro_units"] <= forecast["high_micro_units"]
    [prompts] = found["prompts"]
    assert prompts["input_cached_tokens"] * 9 == prompts["input_tokens"] * 6
    rates = (
        await shared_gateway.sql("SELECT cache_read, cache_write, uncached FROM price_rate WHERE tier = 'interactive'")
    )[0]
    saved = USAGE.cache_read * (rates[2] - rates[0]) + USAGE.cache_write * (rates[2] - rates[1])
    assert prompts["saved_micro_units"] == saved // 10**6 * prompts["num_requests"]
    assert "top_tenants" not in found
    async with signed_in(shared_gateway, key) as browser:
        page = await browser.get("")
        assert f"Spent today (UTC) {money(charge, 'USD')}" in page.words
        assert f'title="{money(prompts["saved_micro_units"], "USD")}"' in page.text
        assert "Forecast: What was spent this month" in page.words
        assert other not in page.text


async def test_the_nearest_cap_is_named_with_the_time_at_which_it_stops_requests(shared_gateway):
    tenant, key = await shared_gateway.new_tenant("capped")
    charge = await spend(shared_gateway, tenant)
    await budget(shared_gateway, tenant, 100 * charge)
    await budget(shared_gateway, tenant, 2 * charge, period="day")
    await budget(shared_gateway, tenant, charge // 2, hard=False)
    caps = (await summary(shared_gateway, key))["caps"]
    assert [(cap["used_micro_units"], cap["limit_micro_units"]) for cap in caps] == [
        (charge, 2 * charge),
        (charge, 100 * charge),
    ]
    async with signed_in(shared_gateway, key) as browser:
        page = await browser.get("")
        assert "What would stop requests first: Budget by day of the tenant" in page.words
        assert f"% of {100 * charge / 10**6:,.2f} USD" in page.words
        csv = await browser.get("?table=limits&format=csv")
        assert "used_share" in csv.text.splitlines()[0]
        assert "Budget by day" in csv.text.splitlines()[1]
    await budget(shared_gateway, tenant, charge, period="day")
    async with signed_in(shared_gateway, key) as browser:
        assert "It refuses requests now" in (await browser.get("")).words


async def test_a_full_window_is_named_before_a_budget_that_lasts(shared_gateway):
    """Windows stood in the table alone, and the sentence above it named a budget of which nothing was used."""
    tenant, key = await shared_gateway.new_tenant("hurried", limits=Limits(requests_per_minute=1))
    await budget(shared_gateway, tenant, 10**9)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    async with shared_gateway.session(key) as session, session.post("/v1/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
    async with signed_in(shared_gateway, key) as browser:
        page = await browser.get("")
        assert "What would stop requests first: Requests per minute of this key: 1 of 1 are used." in page.words
        assert "It refuses requests now; it is free again by" in page.words
        csv = await browser.get("?table=limits&format=csv")
        assert csv.text.splitlines()[1].startswith('"Requests per minute of this key"')


async def test_the_operator_sees_the_sum_and_who_spent_most(shared_gateway):
    tenant, _ = await shared_gateway.new_tenant(PROBE)
    for _ in range(3):
        await spend(shared_gateway, tenant)
    found = await summary(shared_gateway, shared_gateway.keys.admin_key, "/admin/v1/usage/summary")
    assert tenant in [one["project_id"] for one in found["top_tenants"]]
    total = (await shared_gateway.sql("SELECT sum(charge) FROM rollup_month WHERE currency = 'USD'"))[0][0]
    assert (
        sum(day["amount_micro_units"] for day in found["spending"][0]["days"])
        >= found["spending"][0]["today_micro_units"]
    )
    assert found["spending"][0]["month_micro_units"] <= total
    async with signed_in(shared_gateway, shared_gateway.keys.admin_key) as browser:
        page = await browser.get("")
        assert "Tenants that spent most" in page.words
        assert "<script>alert" not in page.text
        csv = await browser.get("?table=top-tenants&format=csv")
        assert PROBE.replace('"', '""') in csv.text


async def test_figures_with_kept_kv_agree(shared_gateway):
    """The tile's share of the cap had charges for kept KV, which the cap does not count, and the tenants' sums had none."""
    tenant, key = await shared_gateway.new_tenant("keeper")
    charge = await spend(shared_gateway, tenant)
    await keep_kv(shared_gateway, tenant)
    await budget(shared_gateway, tenant, 10 * charge)
    async with signed_in(shared_gateway, key) as browser:
        words = (await browser.get("")).words
        assert f"Spent in {time.strftime('%Y-%m', time.gmtime())} {(charge + KEPT_CHARGE) / 10**6:,.2f} USD" in words
        assert f"10.0 % of {10 * charge / 10**6:,.2f} USD , the cap that is enforced, without the charges for" in words
        assert "kept KV included, USD spent" in words  # the line of the month, whose cap counts none
    found = await summary(shared_gateway, shared_gateway.keys.admin_key, "/admin/v1/usage/summary")
    [mine] = [one for one in found["top_tenants"] if one["project_id"] == tenant]
    assert (mine["month_micro_units"], mine["num_requests"]) == (charge + KEPT_CHARGE, 1)


async def test_failures_are_counted_by_cause(shared_gateway):
    tenant, key = await shared_gateway.new_tenant("unlucky")
    async with shared_gateway.session(key) as session:
        for _ in range(2):
            async with session.post("/v1/chat/completions", json={"model": "none", "messages": []}) as answer:
                assert answer.status >= 400
        async with session.get("/v1/models"):
            pass
    await _logged(shared_gateway, tenant, 3)
    failures = (await summary(shared_gateway, key))["failures"]
    assert failures["num_failed"] == 2
    assert failures["num_requests"] == 2  # reading the list of models is no work
    assert [(cause["status"], cause["num_requests"]) for cause in failures["causes"]] == [(answer.status, 2)]
    async with signed_in(shared_gateway, key) as browser:
        page = await browser.get("")
        assert f"{answer.status} {failures['causes'][0]['error_code']} 2" in page.words
        [link] = re.findall(r'href="/console(/requests\?outcome=[^"]*)"', page.text)
        assert (await browser.get(unescape(link))).text.count(failures["causes"][0]["outcome"] + "</span>") == 2


async def test_a_key_that_may_not_read_usage_is_told_which_scope_it_lacks(shared_gateway):
    _, key = await shared_gateway.new_tenant("talker", scopes=("chat",))
    async with signed_in(shared_gateway, key) as browser:
        page = await browser.get("")
        assert page.status == 200
        assert "usage:read" in page.words


async def _logged(gateway: RunningGateway, tenant: str, count: int) -> None:
    for _ in range(400):
        rows = await gateway.sql("SELECT count(*) FROM request_log WHERE tenant_id = :t", t=tenant)
        if rows[0][0] >= count:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the requests were not logged")
