"""The limiter against a Redis that is real, and that goes away, hangs, forgets and comes back."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from contextlib import asynccontextmanager

import pytest
from load import stretched
from sqlalchemy import func, select

from accounting.database.db import Database
from accounting.limits import limiter_state
from accounting.tables.limiter_models import LimiterBuilt
from accounting.values import clock
from accounting.values.types import Limits, Principal
from gateway.base.redis_link import LimiterUnavailable, RedisLink
from gateway.limiter.limits import Limiter, ReservationEnded, limiter_link
from gateway.limiter.redis_keys import CLAIMS_KEY
from gateway.limiter.rules import LimitSubject
from gateway.limiter.upkeep import Upkeep

START_MS = 1_790_000_000_000
LADDER = [(64, 640), (8, 80), (1, 10)]


class Clock:
    def __init__(self) -> None:
        self.now_ms = START_MS

    def __call__(self) -> int:
        return self.now_ms


def holder(
    number: int, tenant: Limits | None = None, slot: str = "", now_ms: int = 0, tenant_id: str = "proj_1"
) -> LimitSubject:
    principal = Principal(
        "tenant",
        tenant_id,
        "key_1",
        frozenset(),
        tenant_limits=tenant or Limits(tokens_per_minute=10**9),
        model_limits=(("m", Limits()),),
    )
    now_ms = now_ms or time.time_ns() // 1_000_000
    return LimitSubject.of(f"req_{slot}{number}", principal, "m", "interactive", now_ms=now_ms)


async def nothing_to_ship() -> None:
    """These requests are in no journal."""


@pytest.fixture
async def limiter_of(sqlite_books):
    made = []

    def make(link: RedisLink, slot: int, now_ms=None) -> Limiter:
        made.append(Limiter(link, slot, sqlite_books, caught_up=nothing_to_ship, now_ms=now_ms))
        return made[-1]

    yield make
    for limiter in made:
        await kept(limiter)


async def kept(limiter: Limiter) -> None:
    """Until the claims of its states are in SQL."""
    await limiter.rebuilder._claims.close()


TOKENS = "t:tokens:1"


@pytest.fixture
async def link(own_redis):
    """Patient: the timeouts of production are tested by `impatient`, not by a busy machine."""
    link = limiter_link(own_redis.url, timeout_s=2)
    yield link
    await link.close()


@pytest.fixture
async def impatient(own_redis):
    link = limiter_link(own_redis.url, timeout_s=stretched(0.1))
    yield link
    await link.close()


async def counters(link: RedisLink) -> dict[str, int]:
    run, tok, mu = await link.command("HMGET", "hg:{t:proj_1}:s", "n", "tok:t", "mu")
    return {"run": int(run), "tok": int(tok or 0), "mu": int(mu)}


async def test_64_clients_never_exceed_a_limit_in_any_window(own_redis, limiter_of) -> None:
    """Two gateways, one clock that runs through three minutes."""
    limits, clock, rng = Limits(50, 4000, 9), Clock(), random.Random(1)
    links = [limiter_link(own_redis.url, timeout_s=2) for _ in range(2)]
    limiters = [limiter_of(link, slot, clock) for slot, link in enumerate(links)]
    admitted: list[int] = []
    taken: list[tuple[int, int]] = []
    running, most = 0, 0

    async def client(number: int) -> None:
        nonlocal running, most
        limiter = limiters[number % 2]
        for turn in range(12):
            who = holder(turn, limits, slot=f"{number}_", now_ms=clock.now_ms)
            prompt = rng.randrange(1, 60)
            verdict = await limiter.reserve(who, prompt, 0, LADDER)
            clock.now_ms += rng.randrange(0, 300)
            if verdict.failing:
                assert verdict.wait_ms > 0
                continue
            running += 1
            most = max(most, running)
            admitted.append(verdict.now_ms)
            output = rng.randrange(0, verdict.bound + 1)
            await asyncio.sleep(rng.random() / 200)
            taken.append((verdict.now_ms, prompt + output))
            running -= 1
            if rng.random() < 0.3:
                await limiter.release(who)
                taken.pop()
            else:
                await limiter.settle(who, 0, prompt, output)

    async with asyncio.TaskGroup() as clients:
        for number in range(64):
            clients.create_task(client(number))
    assert clock.now_ms - START_MS > 60_000
    assert len(admitted) > 50
    for end in admitted:
        assert sum(end - 60_000 < at <= end for at in admitted) <= 50
        assert sum(tokens for at, tokens in taken if end - 60_000 < at <= end) <= 4000
    assert most == 9
    assert await counters(links[0]) == {"run": 0, "tok": 0, "mu": 0}
    for limiter, link in zip(limiters, links, strict=True):
        await kept(limiter)
        await link.close()


async def test_a_client_that_waits_as_told_is_admitted_on_redis_time(link: RedisLink, limiter_of) -> None:
    """The server's own clock: the wait is a minute, so the window is aged by hand instead."""
    limiter, limits = limiter_of(link, 0), Limits(requests_per_minute=1)
    first = await limiter.reserve(holder(1, limits), 10, 0, LADDER)
    refused = await limiter.reserve(holder(2, limits), 10, 0, LADDER)
    assert first.failing is None
    assert (refused.failing.level, refused.failing.dimension) == ("tenant", "requests_per_minute")
    assert 59_000 < refused.wait_ms <= 61_000
    # The same second, 60 s back: now only the rest of the current second has to pass.
    second = first.now_ms // 1000
    window = "hg:{t:proj_1}:w:t:requests:1"
    await link.command("HDEL", window, second)
    await link.command("HSET", window, second - 60, 1, "lo", second - 60, "hi", second - 60)
    soon = await limiter.reserve(holder(3, limits), 10, 0, LADDER)
    if soon.failing:
        assert 0 < soon.wait_ms <= 1000
        await asyncio.sleep(soon.wait_ms / 1000)
        soon = await limiter.reserve(holder(4, limits), 10, 0, LADDER)
    assert soon.failing is None


async def test_without_redis_nothing_is_granted_and_nobody_waits_long(own_redis, impatient, limiter_of) -> None:
    limiter = limiter_of(impatient, 0)
    await limiter.reserve(holder(0), 10, 0, LADDER)
    own_redis.kill()
    for number in range(1, 8):
        started = time.monotonic()
        with pytest.raises(LimiterUnavailable):
            await limiter.reserve(holder(number), 10, 0, LADDER)
        assert time.monotonic() - started < stretched(0.25)
    assert not impatient.is_open
    own_redis.start()
    deadline = time.monotonic() + stretched(3)
    while time.monotonic() < deadline:
        try:
            assert (await limiter.reserve(holder(9), 10, 0, LADDER)).failing is None
            break
        except LimiterUnavailable:
            await asyncio.sleep(0.1)
    assert impatient.is_open
    assert time.monotonic() < deadline


async def test_a_hanging_redis_costs_150_ms_and_then_nothing(own_redis, impatient, limiter_of) -> None:
    limiter = limiter_of(impatient, 0)
    await limiter.reserve(holder(0), 10, 0, LADDER)
    await kept(limiter)
    own_redis.send(signal.SIGSTOP)
    waits = []
    for number in range(1, 8):
        started = time.monotonic()
        with pytest.raises(LimiterUnavailable):
            await limiter.reserve(holder(number), 10, 0, LADDER)
        waits.append(time.monotonic() - started)
    assert max(waits) < stretched(0.3)  # 150 ms on a quiet machine
    assert waits[-1] < stretched(0.02)  # the breaker
    assert not impatient.is_open
    own_redis.send(signal.SIGCONT)
    impatient._closed_until = 0.0  # a second later
    # Replies of the calls given up must not be taken for those of later ones.
    verdict = await limiter.reserve(holder(50), 77, 0, LADDER)
    assert (verdict.failing, verdict.bound) == (None, 64)


async def test_an_ending_that_redis_did_not_hear_is_repeated(
    own_redis, impatient, limiter_of, sqlite_books, monkeypatch
) -> None:
    monkeypatch.setattr("gateway.limiter.upkeep.EVERY_S", 0.2)
    limiter = limiter_of(impatient, 0)
    upkeep = Upkeep(limiter, impatient, sqlite_books)
    await upkeep.start()
    await limiter.reserve(holder(0), 10, 5, LADDER)
    own_redis.send(signal.SIGSTOP)
    await limiter.settle(holder(0), 5, 10, 3)
    assert limiter.num_owed == 1
    own_redis.send(signal.SIGCONT)
    for _ in range(100):
        if limiter.num_owed == 0:
            break
        await asyncio.sleep(0.05)
    assert limiter.num_owed == 0
    assert await counters(impatient) == {"run": 0, "tok": 0, "mu": 0}
    await upkeep.close()


@pytest.mark.parametrize("loss", ["flush", "restart empty", "state evicted", "open set evicted"])
async def test_what_redis_forgot_is_put_back_before_anyone_is_admitted(
    own_redis, link, loss, limiter_of, monkeypatch
) -> None:
    monkeypatch.setattr("gateway.limiter.rebuild.CLAIMED_S", 0.1)  # nobody else builds what this one has claimed
    limits = Limits(tokens_per_minute=1000, concurrency=3)
    limiter = limiter_of(link, 0)
    for number in range(2):
        await limiter.reserve(holder(number, limits), 100, 7, LADDER)
    await limiter.extend(holder(0, limits), 1, LADDER, 0, 60)
    before = await counters(link)
    if loss == "flush":
        await link.command("FLUSHALL")
    elif loss == "restart empty":
        own_redis.kill()
        for path in (own_redis.directory / "appendonlydir").iterdir():
            path.unlink()
        own_redis.start()
    elif loss == "state evicted":
        await link.command("DEL", "hg:{t:proj_1}:s")
    else:
        await link.command("DEL", "hg:{t:proj_1}:open")
    third = await limiter.reserve(holder(2, limits), 10, 7, LADDER)
    assert list(third.running.values()) == [3]
    assert third.windows[TOKENS].sum >= before["tok"] + 10
    fourth = await limiter.reserve(holder(3, limits), 10, 7, LADDER)
    assert fourth.failing.dimension == "concurrency"
    for number in range(3):
        await limiter.settle(holder(number, limits), 0, 0, 0)
    assert await counters(link) == {"run": 0, "tok": 0, "mu": 0}


async def claims_of(database: Database) -> int:
    async with database.read() as conn:
        return await conn.scalar(select(func.count()).select_from(LimiterBuilt))


@pytest.mark.parametrize("asking", [0, 1])
async def test_a_state_whose_claim_is_not_in_sql_yet_is_built_once(
    asking, own_redis, limiter_of, sqlite_books, monkeypatch
) -> None:
    """SQLite's writer is held while a first state is built and lost. It may not be built again under its epoch, by
    whomever, because what was granted under it is in no list. The state of the next epoch has it.
    """
    monkeypatch.setattr("gateway.limiter.upkeep.EVERY_S", 0.2)
    monkeypatch.setattr("gateway.limiter.rebuild.CLAIMED_S", 0.2)
    links = [limiter_link(own_redis.url, timeout_s=2) for _ in range(2)]
    limiters = [limiter_of(link, slot) for slot, link in enumerate(links)]
    upkeeps = [Upkeep(limiter, link, sqlite_books) for limiter, link in zip(limiters, links, strict=True)]
    for upkeep in upkeeps:
        await upkeep.start()
    limits, asks = Limits(concurrency=2), limiters[asking]
    epoch = await asks.incidents.epoch("proj_1")
    async with sqlite_books.write():
        await limiters[0].reserve(holder(0, limits), 100, 7, LADDER)
        assert await claims_of(sqlite_books) == 0
        await links[0].command("DEL", "hg:{t:proj_1}:s")
        asked = asyncio.create_task(asks.reserve(holder(1, limits), 100, 7, LADDER))
        await asyncio.wait([asked], timeout=0.5)
        assert not asked.done()
    verdict = await asked
    assert list(verdict.running.values()) == [2]
    assert await asks.incidents.epoch("proj_1") == epoch + 1
    for link, upkeep in zip(links, upkeeps, strict=True):
        await upkeep.close()
        await link.close()


async def test_sqls_writer_holds_up_nobody_but_those_whose_lists_are_missing(link, limiter_of, sqlite_books) -> None:
    """A tenant's state is damaged or a charge of it was taken back, and SQLite's writer is held. What the gateway has to
    list for it waits; a new tenant does not.
    """
    limiter = limiter_of(link, 0)
    await limiter.reserve(holder(0), 100, 7, LADDER)
    epoch = await limiter.incidents.epoch("proj_1")
    await kept(limiter)
    async with sqlite_books.write() as conn:
        await limiter_state.raise_for_tenants(conn, {"proj_1": epoch}, time.time_ns() // 1_000_000)
    async with sqlite_books.write():
        upkeep = asyncio.create_task(limiter.incidents.follow())
        until = time.monotonic() + stretched(5)
        while await limiter.incidents.epoch("proj_1") == epoch:
            assert time.monotonic() < until
            await asyncio.sleep(0.01)
        anew = asyncio.create_task(limiter.reserve(holder(1), 100, 7, LADDER))
        for number in range(3):
            newcomer = holder(number, tenant_id=f"newcomer_{number}")
            verdict = await asyncio.wait_for(limiter.reserve(newcomer, 100, 7, LADDER), stretched(2))
            assert verdict.windows[TOKENS].sum == 164
        assert not anew.done()
    await upkeep
    assert (await anew).windows[TOKENS].sum == 2 * 164
    await limiter.rebuilder.leave()


async def test_claims_of_a_process_that_was_killed_reach_sql(link, limiter_of, sqlite_books) -> None:
    killed = limiter_of(link, 0)
    await killed.incidents.follow()
    async with sqlite_books.write():
        await killed.reserve(holder(0), 100, 7, LADDER)
        killed.rebuilder._claims._keeping.cancel()
    assert await claims_of(sqlite_books) == 0
    successor = limiter_of(link, 0)
    upkeep = Upkeep(successor, link, sqlite_books)
    await upkeep.start()
    until = time.monotonic() + stretched(5)
    while await claims_of(sqlite_books) != 1 or await link.command("HLEN", CLAIMS_KEY):
        assert time.monotonic() < until
        await asyncio.sleep(0.05)
    await upkeep.close()


async def test_a_gateway_that_ends_brings_its_claims_into_sql_without_a_pause(
    link, limiter_of, sqlite_books, monkeypatch
) -> None:
    monkeypatch.setattr("gateway.limiter.claims.PAUSE_S", 60.0)
    limiter = limiter_of(link, 0)
    upkeep = Upkeep(limiter, link, sqlite_books)
    await upkeep.start()
    await limiter.reserve(holder(0), 100, 7, LADDER)
    assert await claims_of(sqlite_books) == 0
    await upkeep.close()
    assert await claims_of(sqlite_books) == 1


async def test_two_gateways_put_back_what_each_holds(own_redis, limiter_of, sqlite_books, monkeypatch) -> None:
    monkeypatch.setattr("gateway.limiter.upkeep.EVERY_S", 0.1)
    links = [limiter_link(own_redis.url, timeout_s=2) for _ in range(2)]
    limiters = [limiter_of(link, slot) for slot, link in enumerate(links)]
    upkeeps = [Upkeep(limiter, link, sqlite_books) for limiter, link in zip(limiters, links, strict=True)]
    for number, (limiter, upkeep) in enumerate(zip(limiters, upkeeps, strict=True)):
        await upkeep.start()
        await limiter.reserve(holder(number), 100, 7, LADDER)
    await links[0].command("FLUSHALL")
    verdict = await limiters[0].reserve(holder(2), 100, 7, LADDER)  # waits for the other's list
    assert verdict.windows[TOKENS].sum == 3 * 164
    assert await counters(links[0]) == {"run": 3, "tok": 3 * 164, "mu": 3 * 647}
    for number in range(3):
        await limiters[number % 2].release(holder(number))
    assert await counters(links[0]) == {"run": 0, "tok": 0, "mu": 0}
    for link, upkeep in zip(links, upkeeps, strict=True):
        await upkeep.close()
        await link.close()


async def test_a_builder_whose_clock_is_ahead_waits_for_the_others_list(
    own_redis, limiter_of, sqlite_books, monkeypatch
) -> None:
    """It took the other gateway for dead at once, and what that gateway held was lost."""
    links = [limiter_link(own_redis.url, timeout_s=2) for _ in range(2)]
    builder, other = (limiter_of(link, slot) for slot, link in enumerate(links))
    await builder.incidents.follow()
    await other.reserve(holder(1), 100, 7, LADDER)
    async with sqlite_books.write() as conn:
        epoch = builder.incidents.of("proj_1")
        await limiter_state.raise_for_tenants(conn, {"proj_1": epoch}, clock.now_ms())
    with monkeypatch.context() as ahead:
        now_ms = clock.now_ms
        ahead.setattr(clock, "now_ms", lambda: now_ms() + 4_000)
        await builder.incidents.follow()
        reserving = asyncio.create_task(builder.reserve(holder(2), 100, 7, LADDER))
        await asyncio.sleep(0.3)
    await other.incidents.follow()  # its upkeep, each second
    grant = await other.extend(holder(1), 1, LADDER, 0)
    assert grant.bound > 64
    await reserving
    assert (await counters(links[0]))["run"] == 2
    for link, limiter in zip(links, (builder, other), strict=True):
        await kept(limiter)
        await link.close()


class Away:
    """A database that goes away, and says nothing of its version."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.is_away = False

    @asynccontextmanager
    async def read(self):
        if self.is_away:
            raise OSError("gone")
        async with self._database.read() as conn:
            yield conn

    @asynccontextmanager
    async def write(self):
        if self.is_away:
            raise OSError("gone")
        async with self._database.write() as conn:
            yield conn

    def data_version(self) -> None:
        return None


async def test_endings_are_repeated_and_expiries_moved_while_sql_is_away(link, sqlite_books, monkeypatch) -> None:
    monkeypatch.setattr("gateway.limiter.upkeep.EVERY_S", 0.01)
    monkeypatch.setattr("gateway.limiter.upkeep.TOUCH_EVERY_S", 0.0)
    database = Away(sqlite_books)
    limiter = Limiter(link, 0, database, caught_up=nothing_to_ship)
    for number in range(2):
        await limiter.reserve(holder(number), 100, 7, LADDER)
    await kept(limiter)
    link._closed_until = asyncio.get_running_loop().time() + 60
    await limiter.settle(holder(0), 7, 100, 0)
    link._closed_until = 0.0
    assert limiter.num_owed == 1
    database.is_away = True
    expires = await link.command("ZSCORE", "hg:{t:proj_1}:open", "req_1")
    upkeep = Upkeep(limiter, link, database)
    await upkeep.start()
    for _ in range(200):
        moved = await link.command("ZSCORE", "hg:{t:proj_1}:open", "req_1") != expires
        if moved and limiter.num_owed == 0:
            break
        await asyncio.sleep(0.01)
    assert (limiter.num_owed, moved) == (0, True)
    await upkeep.close()


@pytest.mark.rest
async def test_a_gateway_that_died_holds_nobody_up_for_long(own_redis, limiter_of, monkeypatch) -> None:
    monkeypatch.setattr("gateway.limiter.rebuild.WAIT_S", 2.0)
    links = [limiter_link(own_redis.url, timeout_s=2) for _ in range(2)]
    living, dead = (limiter_of(link, slot) for slot, link in enumerate(links))
    for number, limiter in enumerate((living, dead)):
        await limiter.reserve(holder(number), 100, 7, LADDER)
    await links[0].command("FLUSHALL")  # and the second says nothing any more
    began = time.monotonic()
    with pytest.raises(LimiterUnavailable):
        await living.reserve(holder(2), 100, 7, LADDER)
    while time.monotonic() - began < stretched(10):
        try:
            await living.reserve(holder(3), 100, 7, LADDER)
            break
        except LimiterUnavailable:
            await asyncio.sleep(0.1)
    assert 2.5 < time.monotonic() - began < stretched(6)
    assert (await counters(links[0]))["run"] == 2
    # It was only stalled: what it holds is listed late, and everything is built once more.
    late = asyncio.create_task(dead.extend(holder(1), 1, LADDER, 0))
    await asyncio.sleep(0.3)
    await living.incidents.follow()
    await late
    await living.extend(holder(0), 1, LADDER, 0)
    assert (await counters(links[0]))["run"] == 3
    for link, limiter in zip(links, (living, dead), strict=True):
        await kept(limiter)
        await link.close()


async def test_a_restart_with_old_data_is_noticed_before_the_first_admission(own_redis, link, limiter_of) -> None:
    """An append-only file may lack its last second: what it says is not believed."""
    await link.command("CONFIG", "SET", "appendfsync", "always")
    limiter = limiter_of(link, 0)
    await limiter.reserve(holder(0), 100, 7, LADDER)
    epoch, life = await limiter.incidents.epoch("proj_1"), link.life
    own_redis.kill()
    own_redis.start()
    verdict = await limiter.reserve(holder(1), 100, 7, LADDER)
    assert link.life != life
    assert await limiter.incidents.epoch("proj_1") > epoch
    assert verdict.windows[TOKENS].sum == 328  # nothing is counted twice
    assert (await counters(link))["run"] == 2


async def test_a_dead_process_leaves_no_reservation_behind(link, limiter_of, sqlite_books) -> None:
    dead, neighbour = limiter_of(link, 0), limiter_of(link, 1)
    for number in range(5):
        await dead.reserve(holder(number), 100, 7, LADDER)
    await neighbour.reserve(holder(9), 100, 7, LADDER)
    successor = limiter_of(link, 0)
    upkeep = Upkeep(successor, link, sqlite_books)
    await upkeep.start()
    assert await counters(link) == {"run": 1, "tok": 164, "mu": 647}
    with pytest.raises(ReservationEnded):
        await dead.extend(holder(0), 1, LADDER, 0)
    await upkeep.close()


async def test_a_suspect_that_nobody_holds_is_released_and_a_held_one_is_not(link, limiter_of, sqlite_books) -> None:
    clock = Clock()
    limiter = limiter_of(link, 0, clock)
    await limiter.reserve(holder(1), 10, 0, LADDER)
    await limiter.reserve(holder(2), 10, 0, LADDER)
    limiter.open_reservations.held.pop("req_2")  # forgotten, as if its reply had been lost
    clock.now_ms += 50_000
    await limiter.touch()
    clock.now_ms += 20_000
    await Upkeep(limiter, link, sqlite_books).release_orphans(str(clock.now_ms))
    assert (await counters(link))["run"] == 1
    assert await link.command("ZSCORE", "hg:{t:proj_1}:open", "req_1") is not None
