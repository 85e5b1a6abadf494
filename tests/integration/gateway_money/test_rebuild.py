"""Limiter states of many tenants at once: how often SQL and Redis are asked does not grow with the tenants."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from load import stretched
from sqlalchemy import delete, event, func, insert, select

from accounting.database.db import Database
from accounting.limits import end_users, limiter_state, quotas
from accounting.requests import request_postings
from accounting.tables.budget_models import BudgetRow
from accounting.tables.limiter_models import EndUserUse, LimiterBuilt, LimiterIncident
from accounting.tables.models import Tenant
from accounting.values import clock
from accounting.values.budget_types import Budget, Quota
from accounting.values.types import Charge, Limits, Principal, RequestFacts, Usage
from gateway.base import ids, redis_link
from gateway.base.errors import ApiError
from gateway.base.redis_link import LimiterUnavailable, RedisLink
from gateway.limiter.limits import Limiter, Verdict, limiter_link
from gateway.limiter.rebuild import Rebuilder
from gateway.limiter.rules import DAY_BUCKET_S, LimitSubject, places_of, window_of
from gateway.metering.admission import AdmissionRequest
from gateway.metering.metering import metering
from gateway.telemetry.record import RequestRecord
from tests.money import posting, record
from workers.process.logs import HANDLED

NUM_TENANTS = 300
LADDER = [(64, 640), (1, 10)]
MONTH, HOUR = 0, 1


@pytest.fixture
async def link(own_redis):
    link = limiter_link(own_redis.url, timeout_s=2)
    yield link
    await link.close()


async def nothing_to_ship() -> None:
    """All endings are in the ledger."""


def budgets_of(tenant_id: str) -> tuple[Budget, ...]:
    """One that every request is charged to, and one of another model."""
    return (
        Budget(id=f"b{MONTH}_{tenant_id}", tenant_id=tenant_id, period="month", limit_micro_units=10**6),
        Budget(id=f"b{HOUR}_{tenant_id}", tenant_id=tenant_id, period="hour", model="other", limit_micro_units=10**6),
    )


def holder(tenant_id: str, number: int, now_ms: int) -> LimitSubject:
    principal = Principal(
        "tenant",
        tenant_id,
        f"key_{tenant_id}",
        frozenset(),
        model_limits=(("m", Limits()),),
        tenant_limits=Limits(tokens_per_minute=10**9),
        budgets=budgets_of(tenant_id),
    )
    return LimitSubject.of(f"req_{tenant_id}_{number}", principal, "m", "interactive", now_ms=now_ms)


async def make_tenants(database: Database, now_ms: int) -> list[str]:
    """Each has ended two requests a moment ago, one of them with another model; the n-th paid 100 + n and 7."""
    tenants = [f"proj_{n:03}" for n in range(NUM_TENANTS)]
    rows = [
        {name: getattr(budget, name) for name in Budget.__struct_fields__ if name != "adjustments"}
        for tenant_id in tenants
        for budget in budgets_of(tenant_id)
    ]
    postings = [
        posting(
            f"req_{model}_{tenant_id}",
            Usage(0, 0, 5, 10),
            tenant_id=tenant_id,
            model=model,
            key_id=f"key_{tenant_id}",
            opened_at_ms=now_ms - 10,
            ended_at_ms=now_ms,
            charge=Charge(charge, 0, 0, 0, charge),
        )
        for n, tenant_id in enumerate(tenants)
        for model, charge in (("m", 100 + n), ("other", 7))
    ]
    async with database.write() as conn:
        await conn.execute(insert(Tenant), [{"id": t, "name": t, "created_at": 1} for t in tenants])
        await conn.execute(insert(BudgetRow), rows)
        await request_postings.post(conn, 0, 1, postings)
    return tenants


@contextmanager
def counted(database: Database, link: RedisLink) -> Iterator[dict[str, int]]:
    """SQL statements, and Redis round trips of anything but `reserve`: how many requests' own calls share one, time says."""
    found = {"statements": 0, "round_trips": 0}
    ask, engine = redis_link._Wire.ask, database._writers.sync_engine
    own = ("EVALSHA", link._sha["reserve"])

    def note_statement(*_: object) -> None:
        found["statements"] += 1

    def note_round_trip(wire, commands, answered):
        found["round_trips"] += any(command[:2] != own for command in commands)
        ask(wire, commands, answered)

    event.listen(engine, "before_cursor_execute", note_statement)
    redis_link._Wire.ask = note_round_trip
    yield found
    redis_link._Wire.ask = ask
    event.remove(engine, "before_cursor_execute", note_statement)


async def admit(limiter: Limiter, tenants: list[str], number: int, now_ms: int) -> list[Verdict]:
    return await asyncio.gather(*(limiter.reserve(holder(t, number, now_ms), 10, 5, LADDER) for t in tenants))


def groups_of(limiter: Limiter) -> list[int]:
    """The sizes of the groups that this limiter rebuilds from now on."""
    groups, build = list[int](), limiter.rebuilder._build

    async def note_group(epochs, *others):
        groups.append(len(epochs))
        await build(epochs, *others)

    limiter.rebuilder._build = note_group
    return groups


async def test_300_tenants_are_built_in_few_statements_and_round_trips(books: Database, link: RedisLink) -> None:
    now_ms = time.time_ns() // 1_000_000
    tenants = await make_tenants(books, now_ms)
    limiter = Limiter(link, 0, books, caught_up=nothing_to_ship)
    groups = groups_of(limiter)
    with counted(books, link) as found:
        verdicts = await admit(limiter, tenants, 0, now_ms)
    # How many groups there are is a matter of when the first refusals come; what one costs is not.
    assert sum(groups) == NUM_TENANTS and len(groups) <= 10
    assert found["statements"] < 80 * len(groups)
    assert found["round_trips"] < 50 * len(groups)
    for n, (tenant_id, verdict) in enumerate(zip(tenants, verdicts, strict=True)):
        month, _ = budgets_of(tenant_id)
        assert verdict.failing is None
        used = {row.split("@")[0]: money.used for row, money in verdict.money.items()}
        assert used == {month.id: 100 + n + 7}
        assert verdict.windows["t:tokens:1"].sum == 2 * 15 + 10 + 64
    await limiter.rebuilder.leave()


async def test_what_each_of_300_tenants_holds_is_put_back(books: Database, link: RedisLink) -> None:
    now_ms = time.time_ns() // 1_000_000
    tenants = await make_tenants(books, now_ms)
    limiter = Limiter(link, 0, books, caught_up=nothing_to_ship)
    await admit(limiter, tenants, 0, now_ms)
    await link.command("FLUSHALL")
    groups = groups_of(limiter)
    with counted(books, link) as found:
        verdicts = await admit(limiter, tenants, 1, now_ms)
    # As above: a busy machine makes several groups of them.
    assert sum(groups) == NUM_TENANTS and len(groups) <= 10
    assert found["statements"] < 80 * len(groups)
    assert found["round_trips"] < 50 * len(groups)
    for verdict in verdicts:
        assert [money.held for money in verdict.money.values()] == [2 * 645]
        assert verdict.windows["t:tokens:1"].sum == 2 * 15 + 2 * 74
    await limiter.rebuilder.leave()


async def test_open_requests_that_nobody_lists_go_with_the_state(books: Database, link: RedisLink) -> None:
    """More than Lua hands on to one command."""
    now_ms = time.time_ns() // 1_000_000
    tenant_id = (await make_tenants(books, now_ms))[0]
    space = f"hg:{{t:{tenant_id}}}"
    left = [f"req_left_{number}" for number in range(1500)]
    for request_id in left:
        await link.command("ZADD", f"{space}:open", 1, request_id)
        await link.command("HSET", f"{space}:r:{request_id}", "state", "open", "mu", 5)
    limiter = Limiter(link, 0, books, caught_up=nothing_to_ship)
    verdict = await limiter.reserve(holder(tenant_id, 0, now_ms), 10, 5, LADDER)
    assert [money.held for money in verdict.money.values()] == [645]
    assert await link.command("ZCARD", f"{space}:open") == 1
    names = await link.command("KEYS", f"{space}:r:*")
    assert names == [f"{space}:r:req_{tenant_id}_0".encode()]
    await limiter.rebuilder.leave()


async def test_a_state_that_comes_after_a_further_loss_is_not_set(books: Database, own_redis) -> None:
    """Its script was sent twice, or is late. The lists that it was made from have no grant that was made under it."""
    now_ms = time.time_ns() // 1_000_000
    tenant_id = (await make_tenants(books, now_ms))[0]
    links = [limiter_link(own_redis.url, timeout_s=2) for _ in range(2)]
    limiters = [Limiter(link, slot, books, caught_up=nothing_to_ship) for slot, link in enumerate(links)]
    sent: list[Callable[[], Awaitable[None]]] = []

    def note(rebuilder: Rebuilder) -> None:
        build = rebuilder._set

        async def noted(*what: Any) -> None:
            sent.append(lambda: build(*what))
            await build(*what)

        rebuilder._set = noted

    async def both(first: int) -> int:
        """Each gateway admits one request, whose number begins at `first`. Returns what is held then."""
        asked = [patiently(one, holder(tenant_id, first + n, now_ms)) for n, one in enumerate(limiters)]
        verdicts = await asyncio.gather(*asked)
        return max(money.held for verdict in verdicts for money in verdict.money.values())

    for limiter in limiters:
        note(limiter.rebuilder)
    assert await both(0) == 2 * 645
    await links[0].command("FLUSHALL")
    assert await both(2) == 4 * 645
    await links[0].command("FLUSHALL")
    await sent[-1]()
    assert await both(4) == 6 * 645
    for limiter, link in zip(limiters, links, strict=True):
        await limiter.rebuilder.leave()
        await link.close()


async def test_damaged_states_of_many_tenants_are_rebuilt_together(books: Database, link: RedisLink) -> None:
    now_ms = time.time_ns() // 1_000_000
    tenants = await make_tenants(books, now_ms)
    limiter = Limiter(link, 0, books, caught_up=nothing_to_ship)
    await admit(limiter, tenants, 0, now_ms)
    damaged = tenants[:200]
    await asyncio.gather(*(link.command("DEL", f"hg:{{t:{t}}}:open") for t in damaged))
    with counted(books, link) as found:
        verdicts = await admit(limiter, tenants, 1, now_ms)
    assert found["statements"] < 80
    assert {v.windows["t:tokens:1"].sum for v in verdicts} == {2 * 15 + 2 * 74}
    assert len({await limiter.incidents.epoch(t) for t in damaged}) == len(damaged)
    await limiter.rebuilder.leave()


async def patiently(limiter: Limiter, who: LimitSubject) -> Verdict:
    """A client that comes again while the state is made."""
    until = time.monotonic() + stretched(10)
    while True:
        try:
            return await limiter.reserve(who, 10, 5, LADDER)
        except LimiterUnavailable:
            assert time.monotonic() < until
            await asyncio.sleep(0.05)


async def test_engine_records_stand_for_a_dead_gateway_until_its_journal_is_replayed(
    books: Database, link: RedisLink
) -> None:
    """Its tokens count at the highest rates in force: 4 micro-units of input, 10 of output."""
    now_ms = time.time_ns() // 1_000_000
    tenant_id = (await make_tenants(books, now_ms))[0]
    living, dead = (Limiter(link, slot, books, caught_up=nothing_to_ship) for slot in range(2))
    running, lost = holder(tenant_id, 0, now_ms), holder(tenant_id, 1, now_ms)
    await living.reserve(running, 10, 5, LADDER)
    await dead.reserve(lost, 10, 5, LADDER)
    usage = Usage(0, 0, 5, 10)
    async with books.write() as conn:
        await request_postings.post_engine_records(
            conn,
            [
                record(lost.request_id, usage, tenant_id=tenant_id),
                # Another attempt of what the living gateway holds: its list counts, this does not.
                record(running.request_id, usage, tenant_id=tenant_id),
            ],
        )
    await link.command("FLUSHALL")
    verdict = await patiently(living, holder(tenant_id, 2, now_ms))
    row = next(iter(verdict.money))
    assert verdict.money[row].used == 107 + 5 * 4 + 10 * 10
    assert verdict.money[row].held == 2 * 645
    assert verdict.windows["t:tokens:1"].sum == 2 * 15 + 15 + 2 * 74
    ended = posting(
        lost.request_id,
        usage,
        tenant_id=tenant_id,
        key_id=f"key_{tenant_id}",
        opened_at_ms=now_ms,
        ended_at_ms=now_ms,
        charge=Charge(3, 0, 0, 0, 3),
    )
    async with books.write() as conn:
        await request_postings.post(conn, 1, 2, [ended])
    successor = Limiter(link, 1, books, caught_up=nothing_to_ship)
    await successor.incidents.follow()
    await living.incidents.follow()
    verdict = await patiently(living, holder(tenant_id, 3, now_ms))
    assert verdict.money[row].used == 107 + 3
    assert verdict.windows["t:tokens:1"].sum == 2 * 15 + 15 + 3 * 74
    for limiter in (living, successor):
        await limiter.rebuilder.leave()


async def test_records_of_running_requests_stand_for_nobody_while_all_gateways_live(
    books: Database, link: RedisLink
) -> None:
    now_ms = time.time_ns() // 1_000_000
    tenant_id = (await make_tenants(books, now_ms))[0]
    limiter = Limiter(link, 0, books, caught_up=nothing_to_ship)
    await limiter.reserve(holder(tenant_id, 0, now_ms), 10, 5, LADDER)
    async with books.write() as conn:
        await request_postings.post_engine_records(conn, [record("req_other", tenant_id=tenant_id)])
    await link.command("FLUSHALL")
    verdict = await limiter.reserve(holder(tenant_id, 1, now_ms), 10, 5, LADDER)
    assert [money.used for money in verdict.money.values()] == [107]
    await limiter.rebuilder.leave()


@pytest.mark.parametrize("dimension", ["requests_per_minute", "requests_per_day"])
async def test_what_an_end_user_took_is_counted_again(books: Database, own_redis, tmp_path, dimension) -> None:
    quota = Quota("end_user", "", dimension, 1)
    principal = Principal("tenant", "proj_1", "key_1", frozenset(), quotas=(quota,))

    def ask(end_user: str) -> AdmissionRequest:
        facts = RequestFacts(
            request_id=ids.request_id(),
            tenant_id="proj_1",
            key_id="key_1",
            model="m",
            tier="interactive",
            prompt_tokens=10,
            user=end_user,
        )
        return AdmissionRequest(facts, principal, 10)

    async with books.write() as conn:
        await conn.execute(insert(Tenant), [{"id": "proj_1", "name": "one", "created_at": 1}])
        await quotas.put(conn, "proj_1", quota, now=1)
    async with metering(
        database=books, redis_url=own_redis.url, slot=0, directory=tmp_path / "journal", limiter_timeout_s=2
    ) as metered:
        alice = await metered.admission.admit(ask("alice"), "r")
        await alice.settle("ok", Usage(0, 0, 10, 5), True)
        await metered.admission.drain()
        await metered.link.command("FLUSHALL")
        with pytest.raises(ApiError) as refused:
            await metered.admission.admit(ask("alice"), "r")
        assert refused.value.status == 429
        assert refused.value.headgate["level"] == "end_user"
        other = await metered.admission.admit(ask("bob"), "r")
        await other.void("internal")
        await metered.admission.drain()
    async with books.write() as conn:
        await end_users.forget(conn, time.time_ns() // 1_000_000)
        assert await conn.scalar(select(func.count()).select_from(EndUserUse)) == 2
        await end_users.forget(conn, time.time_ns() // 1_000_000 + end_users.DAY_MS + 1000)
        assert await conn.scalar(select(func.count()).select_from(EndUserUse)) == 0


async def test_a_models_windows_have_what_its_adapters_and_its_overflow_took(books: Database, link: RedisLink) -> None:
    """Its limits bind them, and a rebuild counted them under names of their own, which no limit has."""
    now_ms = time.time_ns() // 1_000_000
    principal = Principal(
        "tenant",
        "proj_1",
        "key_1",
        frozenset(),
        model_limits=(("m", Limits(requests_per_minute=10, tokens_per_minute=10**9)),),
        quotas=(Quota("model", "m", "requests_per_day", 100),),
    )
    fields = {"tenant_id": "proj_1", "key_id": "key_1", "opened_at_ms": now_ms - 10, "ended_at_ms": now_ms}
    names = ("m", "m:legal", "m:overflow", "other:legal")
    ended = [posting(f"req_{name}", Usage(0, 0, 5, 10), model=name, **fields) for name in names]
    async with books.write() as conn:
        await conn.execute(insert(Tenant), [{"id": "proj_1", "name": "one", "created_at": 1}])
        await quotas.put(conn, "proj_1", principal.quotas[0], now=1)
        await request_postings.post(conn, 0, 1, ended)
    limiter = Limiter(link, 0, books, caught_up=nothing_to_ship)
    who = LimitSubject.of("req_1", principal, "m:legal", "interactive", base="m", now_ms=now_ms)
    verdict = await limiter.reserve(who, 10, 5, LADDER)
    place = places_of("key_1", "m", "interactive")["model"]
    assert {name: window.sum for name, window in verdict.windows.items() if name.startswith(place)} == {
        window_of(place, "requests", 1): 3 + 1,
        window_of(place, "tokens", 1): 3 * 15 + 74,
        window_of(place, "requests", DAY_BUCKET_S): 3 + 1,
    }
    await limiter.rebuilder.leave()


async def test_a_reversal_frees_the_budget_and_no_rate(books: Database, link: RedisLink) -> None:
    now_ms = time.time_ns() // 1_000_000
    tenant_id, other = (await make_tenants(books, now_ms))[:2]
    limiter = Limiter(link, 0, books, caught_up=nothing_to_ship)
    before = await limiter.reserve(holder(tenant_id, 0, now_ms), 10, 5, LADDER)
    assert [money.used for money in before.money.values()] == [107]
    epochs = [await limiter.incidents.epoch(one) for one in (tenant_id, other)]
    for _ in range(2):  # the second changes nothing
        async with books.write() as conn:
            await request_postings.reverse(conn, [f"req_m_{tenant_id}"], "sdk_retry")
    await limiter.incidents.follow()
    after = await limiter.reserve(holder(tenant_id, 1, now_ms), 10, 5, LADDER)
    assert [money.used for money in after.money.values()] == [7]
    assert [money.held for money in after.money.values()] == [2 * 645]
    assert after.windows["t:tokens:1"].sum == before.windows["t:tokens:1"].sum + 74
    found = [await limiter.incidents.epoch(one) for one in (tenant_id, other)]
    assert found == [epochs[0] + 1, epochs[1]]
    await limiter.rebuilder.leave()


@pytest.mark.parametrize("is_known", [True, False])
async def test_a_gateway_that_lists_late_holds_up_no_new_tenant(
    books: Database, link: RedisLink, is_known, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A charge was taken back: its tenant's state is built from every gateway's list, a new tenant's is not."""
    monkeypatch.setattr("gateway.limiter.incidents.DEAD_MS", 60_000)  # on a slow machine the other one is not dead yet
    now_ms = time.time_ns() // 1_000_000
    waiting, newcomer = (await make_tenants(books, now_ms))[:2]
    limiter, late = (Limiter(link, slot, books, caught_up=nothing_to_ship) for slot in range(2))
    for one in (late, limiter):
        await one.incidents.follow()
    if is_known:
        await limiter.reserve(holder(waiting, 0, now_ms), 10, 5, LADDER)
    async with books.write() as conn:
        await request_postings.reverse(conn, [f"req_m_{waiting}"], "sdk_retry")
    if is_known:
        await limiter.incidents.follow()
    anew = asyncio.create_task(limiter.reserve(holder(waiting, 1, now_ms), 10, 5, LADDER))
    while not limiter.rebuilder._unlisted.newest.asked:
        assert not anew.done()
        await asyncio.sleep(0.01)
    verdict = await limiter.reserve(holder(newcomer, 0, now_ms), 10, 5, LADDER)
    assert not anew.done()
    assert [money.used for money in verdict.money.values()] == [108]
    await late.incidents.follow()
    verdict = await anew
    assert [(money.used, money.held) for money in verdict.money.values()] == [(7, (1 + is_known) * 645)]
    for one in (limiter, late):
        await one.rebuilder.leave()


async def raise_for(database: Database, limiter: Limiter, tenant_id: str) -> int:
    async with database.write() as conn:
        await limiter_state.raise_for_tenants(conn, {tenant_id: limiter.incidents.of(tenant_id)}, clock.now_ms())
    await limiter.incidents.follow()
    return limiter.incidents.of(tenant_id)


async def test_gateways_agree_after_a_failover_of_sql_lost_an_incident(books: Database, link: RedisLink) -> None:
    """Its number was given again, to another tenant: one gateway refused that one until a restart, the other this one."""
    one, other = (Limiter(link, slot, books, caught_up=nothing_to_ship) for slot in range(2))
    for limiter in (one, other):
        await limiter.incidents.follow()
    lost = await raise_for(books, one, "proj_1")
    async with books.write() as conn:
        await conn.execute(delete(LimiterIncident).where(LimiterIncident.epoch == lost))
    assert await raise_for(books, other, "proj_2") == lost
    for limiter in (one, other):
        await limiter.incidents.follow()
    for tenant_id in ("proj_1", "proj_2", "proj_3"):
        assert one.incidents.of(tenant_id) == other.incidents.of(tenant_id) > lost
    for limiter in (one, other):
        await limiter.rebuilder.leave()


async def test_a_state_that_is_newer_than_every_incident_is_built_again(books: Database, link: RedisLink) -> None:
    now_ms = time.time_ns() // 1_000_000
    tenant_id = (await make_tenants(books, now_ms))[0]
    before = Limiter(link, 0, books, caught_up=nothing_to_ship)
    await before.incidents.follow()
    lost = await raise_for(books, before, tenant_id)
    await before.reserve(holder(tenant_id, 0, now_ms), 10, 5, LADDER)
    await before.rebuilder.leave()
    async with books.write() as conn:
        await conn.execute(delete(LimiterIncident).where(LimiterIncident.epoch == lost))
        await conn.execute(delete(LimiterBuilt))
    after = Limiter(link, 0, books, caught_up=nothing_to_ship)
    await after.reserve(holder(tenant_id, 1, now_ms), 10, 5, LADDER)
    assert after.incidents.of(tenant_id) > lost
    await after.rebuilder.leave()


async def test_what_a_request_begins_for_many_has_the_ids_of_none(
    books: Database, link: RedisLink, monkeypatch
) -> None:
    now_ms = time.time_ns() // 1_000_000
    [tenant, *_] = await make_tenants(books, now_ms)
    limiter = Limiter(link, 0, books, caught_up=nothing_to_ship)
    round_trip, build, handled = link._round_trip, limiter.rebuilder._build, dict[str, object]()

    async def note_round_trip(*args):
        handled["round trip"] = HANDLED.get()
        await round_trip(*args)

    async def note_build(*args):
        handled["build"] = HANDLED.get()
        await build(*args)

    monkeypatch.setattr(link, "_round_trip", note_round_trip)
    monkeypatch.setattr(limiter.rebuilder, "_build", note_build)
    HANDLED.set(RequestRecord("req_1", "POST"))
    await admit(limiter, [tenant], 0, now_ms)
    assert handled == {"round trip": None, "build": None}
    await limiter.rebuilder.leave()
