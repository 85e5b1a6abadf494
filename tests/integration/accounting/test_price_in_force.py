"""I23: a settle that is priced by a version which was not in force when its request opened is named, and no honest one."""

from __future__ import annotations

import pytest
from money import NOON_MS, RATES, posting, record

from accounting.access import api_keys
from accounting.books import books
from accounting.books.books_prices import LATE_MS
from accounting.database import audit
from accounting.prices import prices, pricing
from accounting.requests import quotes, request_postings
from accounting.tenants import tenants
from accounting.values.types import Rates, Usage
from gateway.http.auth import OUTAGE_S

HOUR_MS = 3_600_000
DEARER = Rates(*(2 * rate for rate in (RATES.cache_read, RATES.cache_write, RATES.uncached, RATES.output)))
TABLE = {("m", "interactive"): RATES, ("m", "batch"): DEARER}
CHANGE_MS = NOON_MS + HOUR_MS


@pytest.fixture
async def owner(conn, pepper) -> dict[str, str]:
    """A tenant that pays by `standard`, of which one version is in force since the hour before noon."""
    await prices.create_sheet(conn, "standard", "USD", 0)
    await prices.add_version(conn, "standard", TABLE, NOON_MS - HOUR_MS)
    tenant = (await tenants.create(conn, "a", now=1)).id
    key = await api_keys.create(conn, pepper, tenant_id=tenant, now=1)
    return {"tenant_id": tenant, "key_id": key.info.id}


async def settle(conn, name: str, owner: dict[str, str], opened_at_ms: int, version: str, **changes) -> None:
    """Posts a settle and the engine's record of it, at the rates of the version where there are any."""
    usage = Usage(16, 32, 5, 100)
    rates = await prices.rates_of(conn, version, "m", changes.get("tier", "interactive")) or RATES
    fields = {"charge": pricing.charge(usage, rates), "price_version": version, "opened_at_ms": opened_at_ms}
    await request_postings.post(conn, 0, 1, [posting(name, usage, **fields, **owner, **changes)])
    await request_postings.post_engine_records(conn, [record(name, usage, tenant_id=owner["tenant_id"])])


async def named(conn) -> tuple[str, ...]:
    """The requests that I23 names. No other equation fails."""
    wrong = {equation.id: equation.failures for equation in (await books.verify(conn)).equations if not equation.ok}
    assert wrong.keys() <= {"I23"}
    return wrong.get("I23", ())


async def assigned(conn, tenant_id: str, sheet: str, from_ms: int, at_ms: int, until_ms: int | None = None) -> None:
    """Assigns a sheet and records it, as the route does."""
    await prices.assign(conn, tenant_id, sheet, from_ms, until_ms, now_ms=at_ms)
    detail = {"from": from_ms // 1000, "until": None if until_ms is None else until_ms // 1000}
    now = at_ms // 1000
    await audit.record(conn, prices.ASSIGNED, actor="x", now=now, tenant_id=tenant_id, object_id=sheet, detail=detail)


async def own_sheet(conn, name: str = "own") -> None:
    await prices.create_sheet(conn, name, "USD", 0)
    await prices.add_version(conn, name, dict.fromkeys(TABLE, DEARER), 0)


async def test_versions_that_were_over_or_had_not_begun_or_never_were_are_named(conn, owner):
    await prices.add_version(conn, "standard", dict.fromkeys(TABLE, DEARER), CHANGE_MS, until_ms=CHANGE_MS + HOUR_MS)
    await settle(conn, "req_early", owner, CHANGE_MS - 1, "standard@2")
    await settle(conn, "req_over", owner, CHANGE_MS + LATE_MS, "standard@1")
    await settle(conn, "req_after_all", owner, CHANGE_MS + HOUR_MS + LATE_MS, "standard@2")
    await settle(conn, "req_before_all", owner, NOON_MS - HOUR_MS - 1, "standard@1")
    await settle(conn, "req_none", owner, NOON_MS, "standard@9")
    await settle(conn, "req_no_sheet", owner, NOON_MS, "")
    await settle(conn, "req_right", owner, NOON_MS, "standard@1")
    assert await named(conn) == ("req_after_all", "req_before_all", "req_early", "req_no_sheet", "req_none", "req_over")
    checked = {equation.id: equation.num_checked for equation in (await books.verify(conn)).equations}
    assert checked["I23"] == 7


async def test_the_minutes_check_names_it_too(conn, owner):
    await prices.add_version(conn, "standard", dict.fromkeys(TABLE, DEARER), CHANGE_MS)
    await settle(conn, "req_early", owner, NOON_MS, "standard@2")
    await settle(conn, "req_right", owner, NOON_MS, "standard@1")
    report = await books.verify_ended(conn, 0, prices.FOR_EVER)
    assert {equation.id: equation.failures for equation in report.equations if not equation.ok} == {
        "I23": ("req_early",)
    }
    report = await books.verify_ended(conn, 0, 1)
    assert report.ok


async def test_a_change_of_prices_while_a_request_runs_is_honest(conn, owner):
    """The price is that of the OPEN, however late the request ends."""
    await prices.add_version(conn, "standard", dict.fromkeys(TABLE, DEARER), CHANGE_MS)
    await settle(conn, "req_old", owner, CHANGE_MS - 1, "standard@1", ended_at_ms=CHANGE_MS + 3 * HOUR_MS)
    await settle(conn, "req_new", owner, CHANGE_MS, "standard@2")
    await settle(conn, "req_batch", owner, CHANGE_MS, "standard@2", tier="batch")
    assert await named(conn) == ()


async def test_what_a_gateway_without_sql_remembers_and_what_a_quote_binds_is_honest(conn, owner):
    await prices.add_version(conn, "standard", dict.fromkeys(TABLE, DEARER), CHANGE_MS)
    await settle(conn, "req_late", owner, CHANGE_MS + LATE_MS - 1, "standard@1")
    assert await named(conn) == ()
    assert OUTAGE_S * 1000 + quotes.LASTS_MS < LATE_MS


async def test_a_future_price_is_honest_from_its_moment_on(conn, owner):
    await prices.add_version(conn, "standard", TABLE, CHANGE_MS, now=NOON_MS // 1000)
    await settle(conn, "req_0", owner, NOON_MS + 1, "standard@1")
    await settle(conn, "req_1", owner, CHANGE_MS, "standard@2")
    assert await named(conn) == ()


async def test_a_back_dated_price_makes_none_wrong_that_opened_before_it_was_known(conn, owner):
    known_ms = CHANGE_MS + 5 * HOUR_MS
    await prices.add_version(conn, "standard", TABLE, CHANGE_MS, now=known_ms // 1000)
    await settle(conn, "req_0", owner, known_ms - 1, "standard@1")
    await settle(conn, "req_1", owner, known_ms, "standard@2")
    assert await named(conn) == ()
    await settle(conn, "req_2", owner, known_ms + LATE_MS, "standard@1")
    assert await named(conn) == ("req_2",)


async def test_a_tenant_pays_by_its_own_sheet_from_its_moment_on_and_no_longer(conn, owner):
    tenant, end_ms = owner["tenant_id"], CHANGE_MS + HOUR_MS
    await own_sheet(conn)
    await assigned(conn, tenant, "own", CHANGE_MS, NOON_MS, until_ms=end_ms)
    for name, opened_ms, version in (
        ("req_before", CHANGE_MS - 1, "standard@1"),
        ("req_first", CHANGE_MS, "own@1"),
        ("req_last", end_ms - 1, "own@1"),
        ("req_after", end_ms, "standard@1"),
        ("req_remembered_standard", CHANGE_MS + LATE_MS - 1, "standard@1"),
        ("req_remembered_own", end_ms + LATE_MS - 1, "own@1"),
    ):
        await settle(conn, name, owner, opened_ms, version)
    assert await named(conn) == ()
    await settle(conn, "req_too_early", owner, CHANGE_MS - 1, "own@1")
    await settle(conn, "req_not_by_its_own", owner, CHANGE_MS + LATE_MS, "standard@1")
    await settle(conn, "req_no_longer_its_own", owner, end_ms + LATE_MS, "own@1")
    assert await named(conn) == ("req_no_longer_its_own", "req_not_by_its_own", "req_too_early")


async def test_a_price_of_another_tenants_sheet_is_named(conn, owner):
    await own_sheet(conn)
    await assigned(conn, (await tenants.create(conn, "b", now=1)).id, "own", 1000, 1000)
    await settle(conn, "req_0", owner, NOON_MS, "own@1")
    assert await named(conn) == ("req_0",)


@pytest.mark.parametrize("first", ["standard", "silver"])
async def test_a_back_dated_assignment_makes_none_wrong_that_opened_before_it_was_known(conn, owner, first):
    tenant, known_ms = owner["tenant_id"], CHANGE_MS + 5 * HOUR_MS
    await own_sheet(conn)
    if first == "silver":
        await own_sheet(conn, "silver")
        await assigned(conn, tenant, "silver", NOON_MS - HOUR_MS, NOON_MS - HOUR_MS)
    # A row of the audit log with another detail is none of an assignment.
    detail = {"from": "long ago"}
    await audit.record(conn, "x", actor="x", now=0, tenant_id=tenant, object_id="own", detail=detail)
    await assigned(conn, tenant, "own", CHANGE_MS, known_ms)
    await settle(conn, "req_0", owner, known_ms - 1, f"{first}@1")
    await settle(conn, "req_1", owner, known_ms, "own@1")
    assert await named(conn) == ()
    await settle(conn, "req_2", owner, known_ms + LATE_MS, f"{first}@1")
    assert await named(conn) == ("req_2",)


async def test_endings_without_a_charge_need_no_price(conn, owner):
    void = posting("req_0", kind="void", price_version="", **owner)
    await request_postings.post(conn, 0, 1, [void])
    await request_postings.post_engine_records(conn, [record("req_0", tenant_id=owner["tenant_id"])])
    assert await named(conn) == ()
