"""I13: what Redis has of budgets is what the books say, while requests run and when they do not."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from accounting.limits import budgets, spend
from accounting.limits.budgets import NewBudget
from accounting.requests import request_postings
from accounting.tenants import tenants
from accounting.values import clock
from accounting.values.types import Principal, RequestFacts, Usage
from gateway.base import ids
from gateway.base.errors import ApiError
from gateway.books.limiter_truth import limiter_equals_books
from gateway.limiter.redis_keys import running_key
from gateway.limiter.rules import LimitSubject, row_of
from gateway.metering.admission import AdmissionRequest
from gateway.metering.metering import metering


@pytest.fixture
async def metered(books, own_redis, tmp_path):
    async with metering(
        database=books, redis_url=own_redis.url, slot=0, directory=tmp_path / "journal", limiter_timeout_s=2
    ) as metered:
        yield metered


@pytest.fixture
async def ask(books):
    return await make_ask(books)


async def make_ask(books, budgeted: str | None = None, name: str = "m", base: str = ""):
    """Requests that are billed under `name`, of a tenant with a budget for `budgeted`."""
    async with books.write() as conn:
        tenant = await tenants.create(conn, "acme", now=1)
        new = NewBudget(tenant_id=tenant.id, limit_micro_units=10**9, period="month", model=budgeted)
        budget = await budgets.create(conn, new, now=1)
    principal = Principal("tenant", tenant.id, "key_1", frozenset(), budgets=(budget,))

    def make() -> AdmissionRequest:
        facts = RequestFacts(
            request_id=ids.request_id(),
            tenant_id=tenant.id,
            key_id="key_1",
            model=name,
            tier="interactive",
            prompt_tokens=10,
        )
        return AdmissionRequest(facts, principal, 50, base=base)

    return make


def row(ask) -> str:
    [budget] = ask().principal.budgets
    return row_of(budget, budget.period_at(time.time_ns() // 1_000_000))


async def served(metered, ask) -> None:
    admitted = await metered.admission.admit(ask(), "r")
    await asyncio.sleep(0.01)
    await admitted.settle("ok", Usage(0, 0, 10, 5), True)


async def check(metered, books, drift_s: float = 0.3):
    journals = {0: metered.journal.directory}
    return await limiter_equals_books(books, metered.link, journals, drift_s=drift_s)


async def test_it_holds_while_requests_run_end_and_are_shipped(books, metered, ask):
    held = await metered.admission.admit(ask(), "r")
    busy = asyncio.gather(*(served(metered, ask) for _ in range(60)))
    for _ in range(5):
        assert (await check(metered, books, drift_s=10)).failures == ()
    await busy
    await held.void("internal")
    await metered.admission.drain()
    await metered.shipper.caught_up()
    found = await check(metered, books)
    assert (found.id, found.ok, found.num_checked) == ("I13", True, 1)


@pytest.mark.parametrize(
    ("budgeted", "name"), [("m", "m:legal"), ("m", "m:overflow"), ("m:legal", "m:legal"), ("other", "m:legal")]
)
async def test_a_models_budget_counts_its_adapters_and_its_overflow(books, metered, budgeted, name):
    """The limiter counted them and the books did not; a rebuild made the budget free again."""
    ask = await make_ask(books, budgeted, name, base="m")
    used = 0 if budgeted == "other" else 10 * 4 + 5 * 10

    async def assert_used(amount: int) -> None:
        await metered.admission.drain()
        await metered.shipper.caught_up()
        [budget] = ask().principal.budgets
        holder = LimitSubject.of("", ask().principal, budgeted, "interactive", now_ms=clock.now_ms())
        async with books.read() as conn:
            assert await spend.spent(conn, budget, budget.period_at(clock.now_ms())) == amount
        assert (await metered.limiter.peek(holder)).money[row(ask)].used == amount
        assert (await check(metered, books)).failures == ()

    await served(metered, ask)
    await assert_used(used)
    await metered.link.command("FLUSHALL")
    await served(metered, ask)
    await assert_used(2 * used)


@pytest.mark.parametrize(("field", "amount"), [("u", 1), ("u", -1), ("h", 1)])
async def test_a_drift_of_one_micro_unit_is_named_until_the_state_is_built_anew(books, metered, ask, field, amount):
    await served(metered, ask)
    running = await metered.admission.admit(ask(), "r")
    await metered.shipper.caught_up()
    tenant_id = ask().principal.tenant_id
    state, counter = f"hg:{{t:{tenant_id}}}:s", f"{field}:{row(ask)}"
    await metered.link.command("HINCRBY", state, counter, amount)
    assert (await check(metered, books)).failures == (row(ask),)
    await metered.link.command("FLUSHALL")
    assert (await check(metered, books)).num_checked == 0  # nothing is there, so nothing is wrong
    await served(metered, ask)
    await running.void("internal")
    await metered.admission.drain()
    found = await check(metered, books)
    assert (found.ok, found.num_checked) == (True, 1)


async def test_an_ending_that_the_books_lost_is_a_drift(books, metered, ask):
    """Told to the limiter, and in no journal."""
    admitted = await metered.admission.admit(ask(), "r")
    await metered.limiter.settle(admitted._holder, 7, 10, 5)
    assert (await check(metered, books)).failures == (row(ask),)
    await admitted.void("internal")


async def test_a_lost_host_is_no_drift_of_the_others(books, metered, ask, own_redis, tmp_path):
    """Its last endings are in its journal alone. While its gateway runs, an ending that nobody has is a drift."""
    async with metering(
        database=books, redis_url=own_redis.url, slot=1, directory=tmp_path / "there", limiter_timeout_s=2
    ) as there:
        admitted = await there.admission.admit(ask(), "r")
        await there.limiter.settle(admitted._holder, 7, 10, 5)
        assert (await check(metered, books)).failures == (row(ask),)
        await metered.link.command("DEL", running_key(1))
        found = await check(metered, books)
        assert (found.failures, found.num_checked) == ((), 0)
        await admitted.void("internal")


async def test_a_charge_that_was_taken_back_is_no_drift(books, metered, ask):
    """The limiter still has it, under an epoch that is over, until the tenant's next request."""
    asked = ask()
    admitted = await metered.admission.admit(asked, "r")
    await admitted.settle("ok", Usage(0, 0, 10, 5), True)
    await metered.admission.drain()
    await metered.shipper.caught_up()
    assert (await check(metered, books)).num_checked == 1
    async with books.write() as conn:
        await request_postings.reverse(conn, [asked.facts.request_id], "sdk_retry")
    await metered.limiter.incidents.follow()
    found = await check(metered, books)
    assert (found.failures, found.num_checked) == ((), 0)
    await served(metered, ask)
    await metered.admission.drain()
    found = await check(metered, books)
    assert (found.failures, found.num_checked) == ((), 1)


async def test_without_redis_it_is_left_out(books, metered, ask, own_redis):
    await served(metered, ask)
    own_redis.kill()
    found = await check(metered, books)
    assert (found.ok, found.num_checked) == (True, 0)


@pytest.mark.rest
async def test_attack_D09_eight_gateways_that_rebuild_at_once_agree_with_the_books(books, ask, own_redis, tmp_path):
    """Redis is emptied three times while each of them serves: what runs, has ended and is not posted yet counts once."""
    async with contextlib.AsyncExitStack() as stack:
        gateways = [
            await stack.enter_async_context(
                metering(
                    database=books, redis_url=own_redis.url, slot=n, directory=tmp_path / f"{n}", limiter_timeout_s=5
                )
            )
            for n in range(8)
        ]
        journals = {n: gateway.journal.directory for n, gateway in enumerate(gateways)}
        held = [await gateway.admission.admit(ask(), "r") for gateway in gateways]
        refused = 0
        for _ in range(3):
            await gateways[0].link.command("FLUSHALL")
            results = await asyncio.gather(
                *(served(gateway, ask) for gateway in gateways for _ in range(8)), return_exceptions=True
            )
            errors = [one for one in results if one is not None]
            assert all(isinstance(one, ApiError) and one.code == "limiter_unavailable" for one in errors), errors
            refused += len(errors)
            found = await limiter_equals_books(books, gateways[0].link, journals, drift_s=10)
            assert found.failures == ()
        assert refused <= 3 * 8
        for one in held:
            await one.void("internal")
        for gateway in gateways:
            await gateway.admission.drain()
            await gateway.shipper.caught_up()
        found = await limiter_equals_books(books, gateways[0].link, journals, drift_s=0.3)
    assert (found.failures, found.num_checked) == ((), 1)
