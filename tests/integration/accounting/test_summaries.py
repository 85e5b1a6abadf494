"""What home pages and previews read, on both dialects: charges, prompts, spenders, failures, caps, effects of prices."""

from __future__ import annotations

from typing import Any

import pytest
from money import NOON_MS, RATES, posting
from sqlalchemy import insert

from accounting.billing import summaries
from accounting.limits import budgets, caps, spend_limits
from accounting.limits.budgets import NewBudget
from accounting.limits.caps import Cap
from accounting.prices import previews, price_lists, prices, pricing
from accounting.requests import failures, request_log, request_postings
from accounting.requests.request_log import LoggedRequest
from accounting.tables.residency_models import ResidencyCharge
from accounting.tenants import tenants
from accounting.values.budget_types import MAX_AMOUNT, Period
from accounting.values.periods import month_start, period_of
from accounting.values.types import OPERATOR_TENANT, Rates, Usage

NOON = NOON_MS // 1000
DAY_S = 86_400
MIDNIGHT = NOON - DAY_S // 2
ONE = Usage(10_000_000, 2_000_000, 3_000_000, 4_000_000)
CHARGE = pricing.charge(ONE, RATES)


@pytest.fixture
async def posted(conn):
    """Requests of two tenants yesterday and today, one of them in another currency, and the prices of one sheet."""
    await prices.create_sheet(conn, "standard", "USD", 1)
    rates: Any = {("m", "interactive"): RATES, ("m", "batch"): RATES}
    await prices.add_version(conn, "standard", rates, 1)
    b = {"tenant_id": "proj_b", "key_id": "key_b"}
    rows = [
        posting("req_1", ONE),
        posting("req_2", ONE, tier="batch", opened_at_ms=NOON_MS - DAY_S * 1000),
        posting("req_3", ONE, **b, opened_at_ms=NOON_MS + 1),
        posting("req_4", ONE, **b, opened_at_ms=NOON_MS + 2),
        posting("req_5", ONE, **b, currency="EUR", price_version="standard_eur@1"),
        posting("req_6", ONE, **b, opened_at_ms=NOON_MS - 40 * DAY_S * 1000),
        posting("req_prefix", ONE, tenant_id=OPERATOR_TENANT),
    ]
    await request_postings.post(conn, 0, 1, rows)
    return conn


async def test_charges_by_day_are_those_of_one_tenant_or_of_all(posted):
    mine = await summaries.charges_by_day(posted, MIDNIGHT - DAY_S, MIDNIGHT + DAY_S, "proj_a")
    assert mine == {"USD": {MIDNIGHT: CHARGE.total, MIDNIGHT - DAY_S: CHARGE.total}}
    everybody = await summaries.charges_by_day(posted, MIDNIGHT - DAY_S, MIDNIGHT + DAY_S, None)
    assert everybody["USD"][MIDNIGHT] == 3 * CHARGE.total
    assert everybody["EUR"] == {MIDNIGHT: CHARGE.total}


async def test_what_the_cache_saved_is_the_price_without_a_cache_less_the_price(posted):
    month = month_start(NOON)
    mine = (await summaries.prompts(posted, month, "proj_a"))["USD"]
    # 12 million tokens are cheaper or dearer than uncached ones: 10 by 0.09, 2 by -0.02.
    assert mine.saved == 2 * (10 * 90_000 - 2 * 20_000)
    assert (mine.num_requests, mine.num_tokens, mine.num_cached) == (2, 30_000_000, 20_000_000)
    everybody = await summaries.prompts(posted, month, None)
    assert everybody["USD"].num_requests == 4
    assert everybody["EUR"].saved == 0  # its price is not known, so nothing is claimed


async def test_the_tenants_that_spent_most_come_first(posted):
    found = await summaries.top_tenants(posted, month_start(NOON), 10)
    assert [(one.tenant_id, one.currency, one.charge) for one in found] == [
        ("proj_a", "USD", 2 * CHARGE.total),
        ("proj_b", "USD", 2 * CHARGE.total),
        ("proj_b", "EUR", CHARGE.total),
    ]
    assert len(await summaries.top_tenants(posted, month_start(NOON), 1)) == 1


async def test_kept_kv_counts_for_the_tenants_that_spent_most(posted):
    """Charges for kept KV were left out, so that the sums were below those of usage and of the month."""
    for hour, tenant_id, charges in (
        (NOON - 3600, "proj_a", (700, 50)),
        (NOON, "proj_c", (5, 0)),
        (NOON - 40 * DAY_S, "proj_a", (10**9, 0)),
    ):
        row = {"request_id": f"residency:{tenant_id}:m:{hour}", "attempt": 1, "tenant_id": tenant_id, "model": "m"}
        row |= {"hour": hour, "price_version": "standard@1", "currency": "USD", "cache": 1, "pinned": 1}
        row |= dict(zip(("charge_cache", "charge_pinned"), charges, strict=True), posted_at_ms=NOON_MS)
        await posted.execute(insert(ResidencyCharge).values(**row))
    found = await summaries.top_tenants(posted, month_start(NOON), 10)
    assert [(one.tenant_id, one.currency, one.num_requests, one.charge) for one in found] == [
        ("proj_a", "USD", 2, 2 * CHARGE.total + 750),
        ("proj_b", "USD", 2, 2 * CHARGE.total),
        ("proj_b", "EUR", 1, CHARGE.total),
        ("proj_c", "USD", 0, 5),
    ]


async def test_a_preview_prices_the_last_seven_days_of_the_sheet(posted):
    new: Any = {("m", "interactive"): Rates(0, 0, 0, 1_000_000)}
    batch, chat = await previews.effects(posted, "standard", new, NOON + 3600)
    assert (batch.tier, batch.charged, batch.priced) == ("batch", CHARGE.total, None)
    assert (chat.num_requests, chat.charged, chat.priced) == (3, 3 * CHARGE.total, 3 * 4_000_000)
    assert await previews.effects(posted, "standard", new, NOON + 9 * DAY_S) == []
    assert await previews.effects(posted, "standar_", new, NOON) == []
    assert len(await previews.effects(posted, "standard_eur", new, NOON)) == 1


async def test_a_month_by_other_prices_is_that_of_the_tenants_who_pay(posted):
    version = await price_lists.get(posted, "standard", 1)
    found = await previews.month_by(posted, period_of(NOON), version, 0, tenant_id=None, after=None, limit=10)
    assert [(one.tenant_id, one.num_requests) for one in found.tenants.items] == [("proj_a", 2), ("proj_b", 2)]
    assert sum(one.num_requests for one in found.models) == 4


async def test_a_preview_prices_a_sum_that_no_request_could_have(posted):
    """Amounts of currencies with small units, such as VND, are large. The preview was refused."""
    await request_postings.post(posted, 0, 2, [posting("req_7", Usage(0, 0, 0, 10**10))])
    new: Any = {("m", "interactive"): Rates(0, 0, 0, pricing.MAX_RATE)}
    _, chat = await previews.effects(posted, "standard", new, NOON + 3600)
    assert chat.priced == (3 * ONE.output + 10**10) * 10**6 > MAX_AMOUNT


def logged(number: int, status: int = 200, **fields: Any) -> LoggedRequest:
    at_ms = NOON_MS + 1000 * number
    outcome, is_tail = ("ok", False) if status == 200 else ("refused", True)
    defaults: dict[str, Any] = {
        "request_id": f"req_{at_ms:012x}7{number:019x}",
        "started_at_ms": at_ms,
        "tenant_id": "proj_a",
        "key_id": "key_a",
        "endpoint": "POST /v1/chat/completions",
        "status": status,
        "outcome": outcome,
        "is_tail": is_tail,
        "error_code": "" if status == 200 else f"code_{status}",
    }
    return LoggedRequest(**{**defaults, **fields})


async def test_failures_are_those_of_requests_for_work_by_cause(conn):
    rows = [logged(n) for n in range(6)]
    rows += [logged(10, 429), logged(11, 429), logged(12, 500), logged(13, 400, tenant_id="proj_b")]
    rows += [logged(14, 404, endpoint="GET /v1/models"), logged(15, endpoint="GET /v1/usage/summary")]
    await request_log.add(conn, rows)
    found = await failures.of_newest(conn, NOON_MS, "proj_a", 1)
    assert (found.num_requests, found.num_failed, found.since_ms) == (9, 3, NOON_MS)
    [cause] = found.causes
    assert (cause.status, cause.error_code, cause.num_requests) == (429, "code_429", 2)
    everybody = await failures.of_newest(conn, NOON_MS + 10_000, None, 9)
    assert (everybody.num_requests, everybody.num_failed) == (4, 4)
    nothing = await failures.of_newest(conn, NOON_MS + 99_000, None, 9)
    assert (nothing.num_requests, nothing.causes) == (0, [])


async def test_only_the_newest_rows_are_looked_at(conn, monkeypatch):
    monkeypatch.setattr(failures, "MAX_REQUESTS", 4)
    await request_log.add(conn, [logged(0, 500), *(logged(n) for n in range(1, 6)), logged(7, 500)])
    found = await failures.of_newest(conn, NOON_MS, "proj_a", 9)
    assert (found.num_requests, found.num_failed) == (4, 1)
    assert found.since_ms == NOON_MS + 3_000


async def test_caps_are_hard_budgets_in_force_and_the_limit_of_all(conn):
    tenant = (await tenants.create(conn, "a", now=1)).id
    for limit, fields in ((1_000, {}), (50, {"hardness": "soft"}), (300, {"period": "day"}), (9, {"model": "n"})):
        new = NewBudget(**{"tenant_id": tenant, "limit_micro_units": limit, "period": "month", **fields})
        await budgets.create(conn, new, now=1)
    await spend_limits.put(conn, OPERATOR_TENANT, 10_000, now_ms=NOON_MS, actor="test")
    charge = pricing.charge(Usage(0, 0, 0, 500), RATES)
    assert charge.total == 200
    await request_postings.post(conn, 0, 1, [posting("req_1", Usage(0, 0, 0, 500), tenant_id=tenant, charge=charge)])
    mine = await caps.nearest(conn, NOON_MS, tenant, 10)
    assert [(cap.limit, cap.used, cap.kind) for cap in mine] == [
        (300, 200, "day"),
        (1_000, 200, "month"),
        (9, 0, "month"),
    ]
    everybody = await caps.nearest(conn, NOON_MS, None, 10)
    assert [(cap.tenant_id, cap.limit, cap.used) for cap in everybody if cap.tenant_id is None] == [(None, 10_000, 200)]
    assert len(await caps.nearest(conn, NOON_MS, None, 2)) == 3  # the cap of all tenants is told beyond the limit


async def test_the_cap_that_is_reached_first_is_the_nearest(conn):
    """At a quarter past noon an hour budget of which 60 % are left is reached at this pace, and a day budget of which less
    is left lasts. The day budget was named, and one place had no room for the other."""
    tenant = (await tenants.create(conn, "a", now=1)).id
    for limit, fields in ((100_000, {}), (440, {"period": "day"}), (500, {"period": "hour", "tier": "interactive"})):
        new = NewBudget(**{"tenant_id": tenant, "limit_micro_units": limit, "period": "month", **fields})
        await budgets.create(conn, new, now=1)
    await request_postings.post(conn, 0, 1, [posting("req_1", Usage(0, 0, 0, 500), tenant_id=tenant)])
    now_ms = NOON_MS + 900_000
    mine = await caps.nearest(conn, now_ms, tenant, 10)
    assert [(cap.kind, cap.reached_at_ms(now_ms)) for cap in mine] == [
        ("hour", NOON_MS + 2_250_000),
        ("day", None),
        ("month", None),
    ]
    [first, *of_the_whole_tenant] = await caps.nearest(conn, now_ms, tenant, 1)
    assert first.kind == "hour"
    assert all(cap.binds_all_of(tenant) for cap in of_the_whole_tenant)


@pytest.mark.parametrize(
    ("used", "reached_at_ms"), [(0, None), (100, 400), (40, 475), (20, None), (-5, None), (101, 400), (25, 700)]
)
def test_a_cap_is_reached_at_the_mean_pace_of_its_period(used, reached_at_ms):
    """The period began at 350 and ends at 550; 50 of it are over."""
    end_ms = 750 if used == 25 else 550
    cap = Cap(kind="fixed", period=Period(350 if used != 25 else 300, end_ms), limit=100, used=used, currency="USD")
    assert cap.reached_at_ms(400) == reached_at_ms
