"""S4: a clock that steps by an hour, Redis' or a gateway's, blocks nobody for an hour, and no budget is lost or passed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest
from sqlalchemy import insert

from accounting.database.db import Database
from accounting.limits import limiter_state
from accounting.requests import request_postings
from accounting.tables.budget_models import BudgetRow
from accounting.tables.models import Tenant
from accounting.values.budget_types import Budget
from accounting.values.types import Charge, Limits, Principal, Usage
from gateway.base.redis_link import LimiterUnavailable, RedisLink
from gateway.limiter.limits import Limiter, Verdict, limiter_link
from gateway.limiter.rules import LimitSubject
from tests.money import posting
from workers.process.rounds import repeat

pytestmark = pytest.mark.rest

HOUR_MS = 3_600_000
LADDER = [(64, 640), (8, 80), (1, 10)]
TOKENS, REQUESTS = "t:tokens:1", "t:requests:1"


class Clock:
    def __init__(self, now_ms: int) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms


class Clocks:
    """Redis' and the books', which run together; `step` moves Redis' alone."""

    def __init__(self) -> None:
        now_ms = time.time_ns() // 1_000_000
        self.redis, self.books = Clock(now_ms), Clock(now_ms)

    def step(self, ms: int) -> None:
        self.redis.now_ms += ms

    def run(self, ms: int) -> None:
        self.redis.now_ms += ms
        self.books.now_ms += ms


async def nothing_to_ship() -> None:
    """All endings are in the ledger."""


@pytest.fixture
async def link(own_redis):
    link = limiter_link(own_redis.url, timeout_s=2)
    yield link
    await link.close()


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.fixture
async def limiter(books: Database, link: RedisLink, clocks: Clocks) -> AsyncIterator[Limiter]:
    limiter = Limiter(link, 0, books, caught_up=nothing_to_ship, now_ms=clocks.redis, books_ms=clocks.books)
    yield limiter
    await limiter.rebuilder.leave()


def holder(number: int, now_ms: int, limits: Limits | None = None, budgets: tuple[Budget, ...] = ()) -> LimitSubject:
    principal = Principal(
        "tenant",
        "proj_1",
        "key_1",
        frozenset(),
        model_limits=(("m", Limits()),),
        budgets=budgets,
        tenant_limits=limits or Limits(tokens_per_minute=10**9, requests_per_minute=10**6),
    )
    return LimitSubject.of(f"req_{number}", principal, "m", "interactive", now_ms=now_ms)


async def wait_until_admitted(reserve: Callable[[], object], clocks: Clocks, limit_ms: int) -> Verdict:
    """As a client that comes again when it is told to."""
    waited_ms = 0
    while True:
        verdict = await reserve()
        if verdict.failing is None:
            return verdict
        assert verdict.wait_ms > 0
        waited_ms += verdict.wait_ms
        assert waited_ms <= limit_ms, f"told to wait {verdict.wait_ms / 1000} s"
        clocks.run(verdict.wait_ms)


async def test_s4_after_an_hour_forth_and_back_a_tenant_at_its_limit_waits_a_minute(
    limiter: Limiter, clocks: Clocks
) -> None:
    limits, number = Limits(requests_per_minute=2), 0

    async def reserve() -> Verdict:
        nonlocal number
        number += 1
        return await limiter.reserve(holder(number, clocks.books(), limits), 10, 5, LADDER)

    for step in (0, HOUR_MS, -HOUR_MS):
        clocks.step(step)
        await wait_until_admitted(reserve, clocks, 61_000)
        while (verdict := await reserve()).failing is None:
            pass
        assert 0 < verdict.wait_ms <= 61_000
    await wait_until_admitted(reserve, clocks, 61_000)


@pytest.mark.parametrize("step", [HOUR_MS, -HOUR_MS])
async def test_s4_what_runs_over_a_step_is_extended_and_ends_and_holds_nothing_more(
    limiter: Limiter, link: RedisLink, clocks: Clocks, step: int
) -> None:
    who = holder(1, clocks.books())
    verdict = await limiter.reserve(who, 10, 5, LADDER)
    clocks.step(step)
    grant = await limiter.extend(who, 1, LADDER, clocks.books())
    assert grant.bound == verdict.bound + 64
    assert (await limiter.peek(who)).windows[TOKENS].open == 10 + grant.bound
    await limiter.settle(who, 100, 10, 20)
    assert limiter.num_owed == 0
    assert await link.command("HMGET", "hg:{t:proj_1}:s", "n", "mu", "tok:t") == [b"0", b"0", None]
    clocks.step(-step)
    await limiter.reserve(holder(2, clocks.books()), 10, 5, LADDER)


async def spend(books: Database, budget: Budget, charge: int, at_ms: int) -> None:
    row = {n: getattr(budget, n) for n in Budget.__struct_fields__ if n != "adjustments"}
    ended = posting(
        "req_before",
        Usage(0, 0, 5, 10),
        tenant_id="proj_1",
        model="m",
        key_id="key_1",
        opened_at_ms=at_ms - 10,
        ended_at_ms=at_ms,
        charge=Charge(charge, 0, 0, 0, charge),
    )
    async with books.write() as conn:
        await conn.execute(insert(Tenant), [{"id": "proj_1", "name": "p", "created_at": 1}])
        await conn.execute(insert(BudgetRow), [row])
        await request_postings.post(conn, 0, 1, [ended])


@pytest.mark.parametrize("ahead", [0, HOUR_MS, -HOUR_MS])
async def test_s4_a_budget_holds_whatever_redis_clock_says(
    books: Database, limiter: Limiter, clocks: Clocks, ahead: int
) -> None:
    """One of the hour: what was spent in this one is not forgotten for Redis being in another, nor is anybody refused."""
    budget = Budget(id="b", tenant_id="proj_1", period="hour", limit_micro_units=1000)
    await spend(books, budget, 900, clocks.books())
    clocks.step(ahead)
    who = holder(1, clocks.books(), budgets=(budget,))
    verdict = await limiter.reserve(who, 1, 5, LADDER)
    (money,) = verdict.money.values()
    assert (money.used, verdict.failing) == (900, None)
    assert money.used + money.held <= 1000
    late = await limiter.reserve(holder(2, clocks.books(), budgets=(budget,)), 1, 5, LADDER)
    assert late.money[who.budgets[0].row].held <= 100


async def test_a_late_request_at_the_edge_of_a_period_finds_its_row_and_empties_no_other(
    books: Database, limiter: Limiter, clocks: Clocks
) -> None:
    """Another gateway's clock is behind, or the request was on its way while the hour ended."""
    budget = Budget(id="b", tenant_id="proj_1", period="hour", limit_micro_units=1000)
    await spend(books, budget, 0, clocks.books())
    await limiter.reserve(holder(0, clocks.books(), budgets=(budget,)), 1, 5, LADDER)
    clocks.run(HOUR_MS - clocks.books() % HOUR_MS + 1000)
    hour_ms = clocks.books() - 1000
    number = 0

    async def spends(charge: int, at_ms: int) -> int:
        """Returns what was used of the request's hour before it."""
        nonlocal number
        number += 1
        who = holder(number, at_ms, budgets=(budget,))
        verdict = await limiter.reserve(who, 1, 5, LADDER)
        await limiter.settle(who, charge, 1, 1)
        return verdict.money[who.budgets[0].row].used

    for hour in range(3):
        assert await spends(400, hour_ms + hour * HOUR_MS) == 0
        assert await spends(300, hour_ms + hour * HOUR_MS) == 400
        if hour:
            assert await spends(100, hour_ms + hour * HOUR_MS - 100) == 699 + hour, "the hour that has just ended"
            assert await spends(1, hour_ms + hour * HOUR_MS) == 700


async def test_a_gateway_whose_own_clock_steps_back_leaves_the_others_what_is_used_of_this_hour(
    books: Database, link: RedisLink, limiter: Limiter, clocks: Clocks
) -> None:
    """It asks for the row of an earlier hour, so that it builds the tenant's state anew by its own clock."""
    budget = Budget(id="b", tenant_id="proj_1", period="hour", limit_micro_units=1000)
    await spend(books, budget, 900, clocks.books())

    def behind() -> int:
        return clocks.books() - 2 * HOUR_MS

    async def used(of: Limiter, number: int, at_ms: int) -> int:
        who = holder(number, at_ms, budgets=(budget,))
        verdict = await of.reserve(who, 1, 5, LADDER)
        await of.release(who)
        return verdict.money[who.budgets[0].row].used

    other = Limiter(link, 1, books, caught_up=nothing_to_ship, now_ms=clocks.redis, books_ms=behind)
    assert await used(limiter, 1, clocks.books()) == 900
    await other.incidents.follow()
    following = asyncio.create_task(repeat(0.02, limiter.incidents.follow))
    try:
        assert await used(other, 2, behind()) == 0
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    assert other.rebuilder.num_built == 1
    assert await used(limiter, 3, clocks.books()) == 900
    await other.rebuilder.leave()


@pytest.mark.parametrize("ahead", [0, HOUR_MS, -HOUR_MS])
async def test_s4_what_counted_in_the_last_minute_counts_under_the_other_clock(
    books: Database, limiter: Limiter, clocks: Clocks, ahead: int
) -> None:
    budget = Budget(id="b", tenant_id="proj_1", period="hour", limit_micro_units=10**6)
    await spend(books, budget, 7, clocks.books())
    clocks.run(30_000)
    clocks.step(ahead)
    found = (await limiter.peek(holder(1, clocks.books()))).windows
    assert (found[TOKENS].sum, found[REQUESTS].sum) == (15, 1)
    assert found[TOKENS].empty_in_ms <= 31_000
    clocks.run(32_000)
    assert (await limiter.peek(holder(1, clocks.books()))).windows[TOKENS].sum == 0


async def test_s4_a_gateway_with_a_clock_ahead_does_not_hold_up_a_rebuild(
    books: Database, limiter: Limiter, clocks: Clocks
) -> None:
    """It raised an incident an hour from now, and another gateway that is dead never lists for it."""
    await limiter.reserve(holder(1, clocks.books()), 1, 5, LADDER)
    later_ms = clocks.books() + HOUR_MS
    async with books.write() as conn:
        await limiter_state.join(conn, 7, clocks.books())
        epoch = (await limiter_state.incidents(conn))[-1].epoch
        await limiter_state.raise_for_tenants(conn, {"proj_1": epoch}, later_ms)
    await limiter.incidents.follow()
    try:
        verdict = await limiter.reserve(holder(2, clocks.books()), 1, 5, LADDER)
    except LimiterUnavailable:
        pytest.fail("the rebuild waits for a moment an hour from now")
    assert verdict.windows[REQUESTS].sum == 2
