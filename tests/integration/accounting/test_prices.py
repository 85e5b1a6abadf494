from __future__ import annotations

import pytest
from money import RATES
from msgspec.structs import replace
from sqlalchemy import insert

from accounting.access import api_keys
from accounting.billing import credits
from accounting.billing.credits import NewCredit
from accounting.database.db import Database
from accounting.lifecycle.bootstrap import bootstrap
from accounting.limits import spend_limits
from accounting.prices import prices
from accounting.tables.models import PriceAssignment
from accounting.tables.residency_models import ResidencyCharge
from accounting.tenants import tenants
from accounting.values.errors import ConflictError, InvalidError, NotFoundError
from accounting.values.types import Price, Rates

FREE = Rates(0, 0, 0, 0)


@pytest.fixture
async def conn(conn):
    await prices.create_sheet(conn, "standard", "usd", 0)
    return conn


async def test_a_version_is_in_force_until_its_successor_begins(conn):
    first = await prices.add_version(conn, "standard", {("m", "interactive"): RATES}, 1000)
    second = await prices.add_version(conn, "standard", {("m", "interactive"): FREE}, 2000)
    assert (first, second) == ("standard@1", "standard@2")
    at = {ms: await prices.price_for(conn, "proj_a", "m", "interactive", ms) for ms in (999, 1000, 1999, 2000)}
    assert at == {
        999: None,
        1000: Price("standard@1", "USD", RATES),
        1999: Price("standard@1", "USD", RATES),
        2000: Price("standard@2", "USD", FREE),
    }


@pytest.mark.parametrize("from_ms", [0, 1000, 1500, 1999])
async def test_an_overlapping_interval_is_refused(conn, from_ms):
    await prices.add_version(conn, "standard", {("m", "interactive"): RATES}, 1000, until_ms=2000)
    with pytest.raises(ConflictError, match="overlaps"):
        await prices.add_version(conn, "standard", {("m", "interactive"): FREE}, from_ms)
    await prices.add_version(conn, "standard", {("m", "interactive"): FREE}, 2000)


async def test_a_version_that_would_begin_with_or_before_the_open_one_is_refused(conn):
    await prices.add_version(conn, "standard", {("m", "interactive"): RATES}, 1000)
    for from_ms in (1000, 500):
        with pytest.raises(ConflictError, match="overlaps"):
            await prices.add_version(conn, "standard", {("m", "interactive"): FREE}, from_ms)


async def test_a_gap_between_two_versions_has_no_price(conn):
    await prices.add_version(conn, "standard", {("m", "interactive"): RATES}, 1000, until_ms=2000)
    await prices.add_version(conn, "standard", {("m", "interactive"): RATES}, 3000)
    assert await prices.price_for(conn, "proj_a", "m", "interactive", 2500) is None


async def test_each_tier_has_rates_of_its_own(conn):
    table = {("m", "interactive"): RATES, ("m", "batch"): FREE, ("n", "interactive"): RATES}
    await prices.add_version(conn, "standard", table, 0)
    batch = await prices.price_for(conn, "proj_a", "m", "batch", 5)
    assert batch is not None
    assert batch.rates == FREE
    assert await prices.price_for(conn, "proj_a", "n", "batch", 5) is None
    assert await prices.priced_models(conn, "proj_a", 5) == ["m", "n"]


async def test_an_assignment_takes_a_tenant_to_another_sheet_from_a_moment_on(conn):
    tenant = (await tenants.create(conn, "a", now=0)).id
    await prices.add_version(conn, "standard", {("m", "interactive"): RATES}, 0)
    await prices.create_sheet(conn, "special", "USD", 0)
    await prices.add_version(conn, "special", {("m", "interactive"): FREE}, 0)
    await prices.assign(conn, tenant, "special", 1000)
    found = [await prices.price_for(conn, tenant, "m", "interactive", ms) for ms in (999, 1000)]
    assert [price.version for price in found] == ["standard@1", "special@1"]
    await prices.assign(conn, tenant, "standard", 2000)
    assert (await prices.price_for(conn, tenant, "m", "interactive", 2000)).version == "standard@1"
    with pytest.raises(ConflictError, match="overlaps"):
        await prices.assign(conn, tenant, "special", 1500)


async def test_a_tenant_has_one_currency(conn):
    tenant = (await tenants.create(conn, "a", now=0)).id
    await prices.create_sheet(conn, "euro", "eur", 0)
    await prices.assign(conn, tenant, "standard", 0)
    with pytest.raises(ConflictError, match="one currency"):
        await prices.assign(conn, tenant, "euro", 1000)
    with pytest.raises(NotFoundError):
        await prices.assign(conn, tenant, "nothing", 1000)


async def test_a_sheet_in_another_currency_changes_the_meaning_of_no_limit(conn):
    tenant = (await tenants.create(conn, "a", now=0)).id
    await prices.create_sheet(conn, "euro", "eur", 0)
    await prices.create_sheet(conn, "dollars", "usd", 0)
    await spend_limits.put(conn, tenant, 10_000_000, now_ms=0, actor="test")
    with pytest.raises(ConflictError, match="in USD: delete them first"):
        await prices.assign(conn, tenant, "euro", 1000)
    await prices.assign(conn, tenant, "dollars", 1000)
    other = (await tenants.create(conn, "b", now=0)).id
    await spend_limits.put(conn, other, 10_000_000, now_ms=0, actor="test")
    await spend_limits.clear(conn, other, now=0, actor="test")
    await prices.assign(conn, other, "euro", 1000)
    assert await prices.currency_of_tenant(conn, other, 1000) == "EUR"


async def test_a_sheet_in_another_currency_strands_no_grant(conn):
    """It was accepted; the grant paid for nothing, and never ended."""
    tenant = (await tenants.create(conn, "a", now=0)).id
    await prices.create_sheet(conn, "euro", "eur", 0)
    await prices.create_sheet(conn, "dollars", "usd", 0)
    wanted = NewCredit(type="grant", tenant_id=tenant, amount=5)
    await credits.create(conn, wanted, key="a", now_ms=1000, actor="test")
    with pytest.raises(ConflictError, match="grants or charges in USD"):
        await prices.assign(conn, tenant, "euro", 1000, now_ms=1000)
    assert await prices.assign(conn, tenant, "dollars", 1000, now_ms=1000)


async def test_kept_kv_that_was_charged_fixes_a_tenants_currency(conn):
    tenant = (await tenants.create(conn, "a", now=0)).id
    await prices.create_sheet(conn, "euro", "eur", 0)
    kept = {"request_id": "kept_1", "attempt": 0, "tenant_id": tenant, "model": "m", "hour": 0, "currency": "USD"}
    kept |= {"price_version": "standard@1", "cache": 1, "pinned": 0, "charge_cache": 1, "charge_pinned": 0}
    await conn.execute(insert(ResidencyCharge).values(**kept, posted_at_ms=1))
    with pytest.raises(ConflictError, match="grants or charges in USD"):
        await prices.assign(conn, tenant, "euro", 1000, now_ms=1000)


async def test_a_request_that_may_still_run_keeps_its_tenants_currency(conn, pepper):
    """It was charged at its first price, and no month of the tenant could be closed any more."""
    tenant = (await tenants.create(conn, "a", now=0)).id
    key = (await api_keys.create(conn, pepper, tenant_id=tenant, now=0)).info
    for name, currency in (("euro", "eur"), ("dollars", "usd")):
        await prices.create_sheet(conn, name, currency, 0)
    await api_keys.touch(conn, {key.id: 1000})
    for at_s in (1000, 1000 + prices.UNPOSTED_S - 1):
        with pytest.raises(ConflictError, match="was used within 15 minutes"):
            await prices.assign(conn, tenant, "euro", at_s * 1000, now_ms=at_s * 1000)
    at_ms = (1000 + prices.UNPOSTED_S) * 1000
    assert await prices.assign(conn, tenant, "euro", at_ms, now_ms=at_ms)
    await api_keys.touch(conn, {key.id: 5000})
    await prices.create_sheet(conn, "dearer", "eur", 0)
    assert await prices.assign(conn, tenant, "dearer", 5_000_000, now_ms=5_000_000)


@pytest.mark.parametrize(("from_ms", "until_ms"), [(2000, None), (1000, 2000), (500, 2000)])
async def test_a_tenant_does_not_pay_in_another_currency_before_or_after_its_sheet(conn, from_ms, until_ms):
    """It would be charged in two currencies, and no month of it could be closed any more."""
    tenant = (await tenants.create(conn, "a", now=0)).id
    await prices.create_sheet(conn, "euro", "eur", 0)
    with pytest.raises(ConflictError, match="would pay in USD before or after"):
        await prices.assign(conn, tenant, "euro", from_ms, until_ms, now_ms=1000)
    await prices.create_sheet(conn, "dollars", "usd", 0)
    assert await prices.assign(conn, tenant, "dollars", from_ms, until_ms, now_ms=1000)


async def test_a_tenant_goes_from_one_sheet_of_its_currency_to_the_next_at_a_later_time(conn):
    tenant = (await tenants.create(conn, "a", now=0)).id
    for name in ("euro", "dearer"):
        await prices.create_sheet(conn, name, "eur", 0)
    await prices.assign(conn, tenant, "euro", 1000, now_ms=1000)
    assert await prices.assign(conn, tenant, "dearer", 5000, now_ms=1000)
    assert [await prices.currency_of_tenant(conn, tenant, at) for at in (1000, 4999, 5000)] == ["EUR"] * 3


async def test_a_tenant_whose_sheet_has_an_end_goes_on_in_its_currency(conn):
    tenant = (await tenants.create(conn, "a", now=0)).id
    for name in ("euro", "dearer"):
        await prices.create_sheet(conn, name, "eur", 0)
    ends = {"tenant_id": tenant, "sheet_id": "euro", "from_ms": 0, "until_ms": 5000}
    await conn.execute(insert(PriceAssignment).values(**ends))
    await spend_limits.put(conn, tenant, 10_000_000, now_ms=1000, actor="test")
    with pytest.raises(ConflictError, match="in USD"):
        await prices.assign(conn, tenant, "dearer", 5001, now_ms=1000)
    assert await prices.assign(conn, tenant, "dearer", 5000, now_ms=1000)
    assert await prices.currency_of_tenant(conn, tenant, 5000) == "EUR"


async def test_a_grant_is_in_the_currency_that_its_tenant_pays_in(conn):
    """One in another currency would pay for nothing."""
    tenant = (await tenants.create(conn, "a", now=0)).id
    await prices.create_sheet(conn, "euro", "eur", 0)
    await prices.assign(conn, tenant, "euro", 1000)
    wanted = NewCredit(type="grant", tenant_id=tenant, amount=5)
    made, _ = await credits.create(conn, wanted, key="a", now_ms=2000, actor="test")
    assert made.currency == "EUR"
    with pytest.raises(InvalidError, match="pays in EUR, and not in USD"):
        await credits.create(conn, replace(wanted, currency="usd"), key="b", now_ms=2000, actor="test")


async def test_bootstrap_prices_a_model_once_and_keeps_the_others(conn):
    rates = {"interactive": RATES, "batch": FREE}
    assert await prices.bootstrap(conn, {"m": rates}, 1000) == []
    assert await prices.bootstrap(conn, {"m": {"interactive": FREE, "batch": FREE}}, 1000) == []
    assert await prices.bootstrap(conn, {"m": rates, "n": rates}, 1000) == []
    assert (await prices.price_for(conn, "proj_a", "m", "interactive", 2000)).rates == RATES
    assert (await prices.price_for(conn, "proj_a", "n", "interactive", 2000)).version == "standard@2"
    assert await prices.priced_models(conn, "proj_a", 2000) == ["m", "n"]


async def test_bootstrap_of_one_more_model_keeps_the_rates_of_kept_kv(conn):
    await prices.add_version(conn, "standard", {("m", "interactive"): RATES}, 1000, residency={"m": (5, 7)})
    await prices.bootstrap(conn, {"n": {"interactive": FREE}}, 2000)
    assert (await prices.price_for(conn, "proj_a", "n", "interactive", 2000)).version == "standard@2"
    assert await prices.residency_rates(conn, "standard@2", "m") == (5, 7)


@pytest.mark.parametrize("last", [{"from_ms": 5000}, {"from_ms": 1000, "until_ms": 5000}])
async def test_bootstrap_leaves_a_sheet_whose_last_version_begins_or_ends_later_alone(conn, last):
    """It would end the version that begins later, or be refused, and the start with it."""
    await prices.add_version(conn, "standard", {("m", "interactive"): RATES}, **last)
    assert await prices.bootstrap(conn, {"m": {"interactive": FREE}, "n": {"interactive": FREE}}, 2000) == ["n"]
    assert (await prices.price_for(conn, "proj_a", "m", "interactive", 4999 + (len(last) == 1))).rates == RATES
    assert await prices.next_change_ms(conn, 2000) == 5000


async def test_a_start_that_cannot_price_a_model_says_so_and_goes_on(migrated_url, caplog):
    database = Database(migrated_url)
    async with database.write() as conn:
        await prices.create_sheet(conn, "standard", "usd", 0)
        await prices.add_version(conn, "standard", {("m", "interactive"): RATES}, prices.FOR_EVER)
    await database.close()
    assert (await bootstrap(migrated_url, bytes(32), {"n": {"interactive": FREE}}, None)).fresh
    assert "no first price was added for n." in caplog.text


async def test_bootstrap_after_the_end_of_all_prices_brings_none_of_them_back(conn):
    await prices.add_version(conn, "standard", {("m", "interactive"): RATES}, 1000, until_ms=2000)
    await prices.bootstrap(conn, {"n": {"interactive": FREE}}, 3000)
    assert await prices.priced_models(conn, "proj_a", 3000) == ["n"]


async def test_bootstrap_makes_no_model_free_that_the_operator_left_out(conn):
    await prices.add_version(conn, "standard", {("m", "interactive"): RATES, ("n", "interactive"): RATES}, 1000)
    await prices.add_version(conn, "standard", {("m", "interactive"): RATES}, 2000)
    await prices.bootstrap(conn, {"m": {"interactive": FREE}, "n": {"interactive": FREE}}, 3000)
    assert await prices.priced_models(conn, "proj_a", 4000) == ["m"]


async def test_the_rates_of_an_old_version_stay_readable(conn):
    await prices.add_version(conn, "standard", {("m", "batch"): RATES}, 0)
    await prices.add_version(conn, "standard", {("m", "batch"): FREE}, 1000)
    assert await prices.rates_of(conn, "standard@1", "m", "batch") == RATES
    assert await prices.rates_of(conn, "standard@7", "m", "batch") is None


async def test_what_is_not_a_price_is_refused(conn):
    refused = (
        ({}, {"from_ms": 0}),
        ({("m", "batch"): Rates(-1, 0, 0, 0)}, {"from_ms": 0}),
        ({("m", "batch"): Rates(0, 0, 0, 10**12 + 1)}, {"from_ms": 0}),
        ({("m", "batch"): RATES}, {"from_ms": 5, "until_ms": 5}),
    )
    for table, interval in refused:
        with pytest.raises(InvalidError):
            await prices.add_version(conn, "standard", table, **interval)
    with pytest.raises(NotFoundError):
        await prices.add_version(conn, "nothing", {("m", "batch"): RATES}, 0)
    with pytest.raises(ConflictError):
        await prices.create_sheet(conn, "standard", "USD", 0)
    with pytest.raises(InvalidError):
        await prices.create_sheet(conn, "a@1", "USD", 0)
