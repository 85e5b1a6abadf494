"""Why the bill changed: two periods, the causes as signed bars, and the first cause in a sentence."""

from __future__ import annotations

import time

import pytest
from console_pages import signed_in
from console_world import spend

from gateway.console import spans
from gateway.console.formats import money
from gateway.console.screens.money.usage_changes import _bars, _times

pytestmark = pytest.mark.asyncio(loop_scope="module")
DAY_S = 86_400
PROBE = "<script>alert(1)</script>'"


def periods(now: int) -> str:
    moments = {
        "before_start": now - 9 * DAY_S,
        "before_end": now - 4 * DAY_S,
        "start": now - 4 * DAY_S,
        "end": now + DAY_S,
    }
    return "&".join(f"{name}={spans.written(second)}" for name, second in moments.items())


async def test_the_difference_and_its_first_cause_are_named(shared_gateway):
    tenant, key = await shared_gateway.new_tenant("grown")
    charge = await spend(shared_gateway, tenant, days_ago=6)
    for _ in range(3):
        await spend(shared_gateway, tenant, days_ago=1)
    asked = periods(int(time.time()))
    async with signed_in(shared_gateway, key) as browser:
        page = await browser.get(f"/usage/changes?{asked}")
        assert f"The bill is {money(2 * charge, 'USD')} higher." in page.words
        assert "The first cause is the number of requests a day." in page.words
        csv = await browser.get(f"/usage/changes?{asked}&format=csv")
        rows = [line.split(",") for line in csv.text.splitlines()[1:]]
        assert sum(int(amount) for *_, amount, _ in rows) == 2 * charge
        assert {currency for *_, currency in rows} == {'"USD"'}
        assert "Why the bill changed" in (await browser.get("/usage")).words
    async with signed_in(shared_gateway, shared_gateway.keys.admin_key) as operator:
        assert "Name a tenant" in (await operator.get("/usage/changes")).words
        page = await operator.get(f"/usage/changes?{asked}&project_id={tenant}")
        assert f"The bill is {money(2 * charge, 'USD')} higher." in page.words


async def test_a_tenant_compares_its_own_bill_alone(shared_gateway):
    other, _ = await shared_gateway.new_tenant("other")
    await spend(shared_gateway, other, days_ago=1)
    _, key = await shared_gateway.new_tenant("curious")
    async with signed_in(shared_gateway, key) as browser:
        page = await browser.get(f"/usage/changes?{periods(int(time.time()))}&project_id={other}")
        assert "Nothing changed between the two periods." in page.words
        for name in ("model", "api_key_id", "project_id"):
            page = await browser.get(f"/usage/changes?{name}={PROBE}")
            assert "<script>alert" not in page.text
        assert (await browser.get("/usage/changes?start=soon")).status == 400


async def test_without_times_this_month_is_compared_with_the_month_before():
    now = spans.read("2026-03-31T10:00")
    times = {
        name: spans.written(at)
        for name, at in _times(dict.fromkeys(("before_start", "before_end", "start", "end"), ""), now).items()
    }
    assert times == {
        "before_start": "2026-02-01T00:00",
        "before_end": "2026-03-01T00:00",  # February is over sooner
        "start": "2026-03-01T00:00",
        "end": "2026-03-31T10:00",
    }


async def test_bars_go_left_and_right_of_the_middle():
    parts = [{"cause": "price", "amount_micro_units": amount} for amount in (100, -50, 0)]
    up, down = _bars({"parts": parts})
    assert (up["x"], up["width"]) == (50.0, 50.0)
    assert (down["x"], down["width"]) == (25.0, 25.0)
