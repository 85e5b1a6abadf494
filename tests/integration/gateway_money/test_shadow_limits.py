"""What limits in shadow mode would have refused: the limiter counts it beside its state, for seven days."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from accounting.values.budget_types import Budget, Quota
from accounting.values.types import Limits, Principal
from gateway.base.redis_link import RedisLink
from gateway.limiter.limits import Limiter, limiter_link
from gateway.limiter.redis_keys import shadow_key
from gateway.limiter.rules import LimitSubject

START_MS = 1_790_000_000_000
DAY_MS = 86_400_000
LADDER = [(64, 640), (8, 80), (1, 10)]


@pytest.fixture
async def link(own_redis) -> AsyncIterator[RedisLink]:
    link = limiter_link(own_redis.url, timeout_s=2)
    yield link
    await link.close()


async def nothing_to_ship() -> None:
    """These requests are in no journal."""


def of_tenant(*quotas: Quota, budgets: tuple[Budget, ...] = (), tenant: Limits | None = None) -> Principal:
    limits = tenant or Limits()
    return Principal("tenant", "proj_1", "key_1", frozenset(), quotas=quotas, budgets=budgets, tenant_limits=limits)


async def test_refusals_in_shadow_mode_are_told_for_seven_days(link, sqlite_books) -> None:
    """They are counted by days in UTC, and days that are over leave the hash."""
    now = [START_MS]
    # The budget is in no books, so its rows must begin after the state was built.
    built_ms = START_MS - 2 * DAY_MS
    limiter = Limiter(
        link, 1, sqlite_books, caught_up=nothing_to_ship, now_ms=lambda: now[0], books_ms=lambda: built_ms
    )
    principal = of_tenant(
        Quota("tenant", "", "requests_per_minute", 0, shadow=True),
        Quota("key", "key_1", "concurrency", 0, shadow=True),
        Quota("end_user", "", "requests_per_minute", 0, shadow=True),
        budgets=(Budget(id="budget_1", tenant_id="proj_1", period="day", limit_micro_units=5, hardness="shadow"),),
    )

    def subject(name: str) -> LimitSubject:
        return LimitSubject.of(f"req_{name}", principal, "m", "interactive", now_ms=now[0], end_user="ann")

    async def ask(name: str) -> None:
        asked = subject(name)
        for _ in range(2):  # the repeated call counts nothing
            verdict = await limiter.reserve(asked, 10, 100, LADDER)
            assert verdict.failing is None
        assert len((await limiter.reserve(subject(f"{name}_again"), 10, 100, LADDER)).shadowed) == 4

    async def told() -> dict[str, int]:
        return dict((await limiter.peek(subject(""))).shadowed)

    names = ("t:requests:1", "run:key_1", "budget_1")
    assert await told() == dict.fromkeys(names, 0)
    await ask("first")
    assert await told() == dict.fromkeys(names, 2)
    now[0] += 3 * DAY_MS
    await ask("second")
    assert await told() == dict.fromkeys(names, 4)
    now[0] += 4 * DAY_MS
    assert await told() == dict.fromkeys(names, 2)
    await ask("third")
    assert await told() == dict.fromkeys(names, 4)
    fields = [field.decode().split() for field in await link.command("HKEYS", shadow_key("proj_1"))]
    assert len({day for day, _ in fields}) == 2, "the first day is deleted"
    assert {name for _, name in fields} == set(names), "there are too many end users to count each"
    assert 0 < await link.command("TTL", shadow_key("proj_1")) <= 7 * 86_400
    await limiter.rebuilder._claims.close()


async def test_a_request_that_another_limit_refuses_counts_for_the_shadow_too(link, sqlite_books) -> None:
    """The metric counts it too. A tenant without shadows has no such key."""
    limiter = Limiter(link, 1, sqlite_books, caught_up=nothing_to_ship, now_ms=lambda: START_MS)
    enforced = LimitSubject.of("req_1", of_tenant(tenant=Limits(0)), "m", "interactive", now_ms=START_MS)
    assert (await limiter.reserve(enforced, 10, 100, LADDER)).failing is not None
    assert not await link.command("EXISTS", shadow_key("proj_1"))
    shadow = Quota("tenant", "", "tokens_per_minute", 0, shadow=True)
    both = LimitSubject.of("req_2", of_tenant(shadow, tenant=Limits(0)), "m", "interactive", now_ms=START_MS)
    verdict = await limiter.reserve(both, 10, 100, LADDER)
    assert (verdict.failing is not None, len(verdict.shadowed)) == (True, 1)
    assert dict((await limiter.peek(both)).shadowed) == {"t:tokens:1": 1}
    await limiter.rebuilder._claims.close()
