"""Three gateways, hundreds of requests, one budget that cannot pay for them: not one micro-unit beyond it, whatever
Redis forgets meanwhile. Every request spends all that it is granted, so the ledger shows what was granted in all."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import shutil
import time
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest
import redis.asyncio
from sqlalchemy import select

from accounting.limits import budgets
from accounting.limits.budgets import NewBudget
from accounting.tables.models import LedgerEntry
from accounting.tenants import tenants
from accounting.values.types import Principal, RequestFacts, Usage
from gateway.base.errors import ApiError
from gateway.limiter.rules import LimitSubject
from gateway.metering.admission import Admission, AdmissionRequest
from gateway.metering.leases import LeaseLost
from gateway.metering.metering import Metering, metering

pytestmark = pytest.mark.rest

PROMPT, OUTPUT = 10, 300
PROMPT_COST, TOKEN_COST = 40, 10
SLOTS = range(3)


@dataclasses.dataclass
class Outcome:
    greedy: float
    admitted: int = 0
    stopped: int = 0
    lost: int = 0
    unavailable: int = 0
    refusals: list[dict] = dataclasses.field(default_factory=list)


@asynccontextmanager
async def three_gateways(database, redis_url: str, directory: Path):
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                metering(
                    database=database,
                    redis_url=redis_url,
                    slot=slot,
                    directory=directory / f"{slot}",
                    limiter_timeout_s=10,
                )
            )
            for slot in SLOTS
        ]


async def tenant_with(database, *limits: int) -> Principal:
    now = int(time.time())
    async with database.write() as conn:
        tenant = await tenants.create(conn, "anna", now=now)
        made = [
            await budgets.create(conn, NewBudget(tenant_id=tenant.id, limit_micro_units=limit, period="month"), now=now)
            for limit in limits
        ]
    return Principal("tenant", tenant.id, "key_1", frozenset(), budgets=tuple(made))


def ask(principal: Principal, number: int) -> AdmissionRequest:
    facts = RequestFacts(
        request_id=f"req_{number:08d}",
        tenant_id=principal.tenant_id,
        key_id="key_1",
        model="m",
        tier="interactive",
        prompt_tokens=PROMPT,
    )
    return AdmissionRequest(facts, principal, OUTPUT)


async def client(admission: Admission, ask: AdmissionRequest, rng: random.Random, outcome: Outcome) -> None:
    """Asks until it is admitted or refused for good; then generates as fast as it is granted."""
    await asyncio.sleep(rng.random())
    for attempt in range(100):
        try:
            facts = msgspec.structs.replace(ask.facts, request_id=f"{ask.facts.request_id}_{attempt}")
            admitted = await admission.admit(msgspec.structs.replace(ask, facts=facts), "r")
            break
        except ApiError as error:
            if error.status == 429:
                outcome.refusals.append(error.headgate or {})
                return
            outcome.unavailable += 1
            await asyncio.sleep(0.1)
    else:
        pytest.fail("never answered")
    outcome.admitted += 1
    bound = admitted.lease_bound
    try:
        while bound < OUTPUT:
            await asyncio.sleep(rng.random() / 20)
            extension = await admitted.extend(bound, cached_tokens=0)
            if extension is None:
                continue
            bound = extension.bound
            if extension.last:
                outcome.stopped += 1
                assert admitted.budget_stop is not None
                break
    except LeaseLost:
        outcome.lost += 1
        await admitted.void("lease_lost")
        return
    await asyncio.sleep(rng.random() / 20)
    if rng.random() < outcome.greedy:
        await admitted.settle("ok", Usage(0, 0, PROMPT, bound), True)
    elif rng.random() < 0.3:
        await admitted.void("internal")
    else:
        await admitted.settle("ok", Usage(0, 0, PROMPT, rng.randrange(bound + 1)), True)


async def run(gateways: list[Metering], principal: Principal, each: int, seed: int, greedy: float = 1.0) -> Outcome:
    rng, outcome = random.Random(seed), Outcome(greedy)
    await asyncio.gather(
        *(
            client(metered.admission, ask(principal, slot * 1000 + n), rng, outcome)
            for slot, metered in enumerate(gateways)
            for n in range(each)
        )
    )
    for metered in gateways:
        await metered.admission.drain()
    return outcome


async def charged(database, tenant_id: str) -> int:
    """Of everything, once it is all posted."""
    async with database.read() as conn:
        rows = await conn.execute(select(LedgerEntry.charge).where(LedgerEntry.tenant_id == tenant_id))
        return sum(row.charge for row in rows)


async def shipped(gateways: list[Metering]) -> None:
    for metered in gateways:
        await metered.shipper.caught_up()


async def money(metered: Metering, principal: Principal) -> list[tuple[int, int]]:
    """(used, held) of each budget, as Redis has it."""
    holder = LimitSubject.of("", principal, "m", "interactive", now_ms=time.time_ns() // 1_000_000)
    peek = await metered.limiter.peek(holder)
    return [(peek.money[use.row].used, peek.money[use.row].held) for use in holder.budgets]


class History:
    """All changes of budgets in the order in which Redis made them, those inside of scripts too."""

    def __init__(self, url: str) -> None:
        self._client = redis.asyncio.Redis.from_url(url)
        self.fields: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.num_changes = 0

    async def watch(self, ready: asyncio.Event) -> None:
        async with self._client.monitor() as monitor:
            ready.set()
            async for command in monitor.listen():
                self._apply(command["command"].split(" "))

    def _apply(self, words: list[str]) -> None:
        name = words[0].upper()
        pairs = zip(words[2::2], words[3::2], strict=False) if name in ("HSET", "HINCRBY") else ()
        for field, amount in pairs:
            if not field.startswith(("u:", "h:")) or "@" not in field:
                continue
            self.num_changes += 1
            self.fields[field] = int(amount) + (self.fields[field] if name == "HINCRBY" else 0)
            row = field[2:]
            self.most[row] = max(self.most[row], self.fields[f"u:{row}"] + self.fields[f"h:{row}"])

    async def close(self) -> None:
        await self._client.aclose()


@asynccontextmanager
async def history_of(url: str):
    history, ready = History(url), asyncio.Event()
    task = asyncio.create_task(history.watch(ready))
    await ready.wait()
    yield history
    await asyncio.sleep(0.2)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await history.close()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("limit", "greedy"), [(20_000, 1.0), (40_007, 0.4)])
async def test_no_instant_of_the_history_is_beyond_the_budget(
    books, own_redis, tmp_path: Path, limit: int, greedy: float
) -> None:
    """600 requests, each for up to 3,040; and a second budget of the same tenant that is larger. `greedy`: the part of
    them that spends all it is granted; the others give something back, or everything."""
    principal = await tenant_with(books, limit, 10 * limit)
    async with three_gateways(books, own_redis.url, tmp_path) as gateways, history_of(own_redis.url) as history:
        assert await money(gateways[0], principal) == [(0, 0), (0, 0)]
        outcome = await run(gateways, principal, 200, seed=limit, greedy=greedy)
        await shipped(gateways)
        used = await money(gateways[0], principal)
    total = await charged(books, principal.tenant_id)
    assert outcome.lost == outcome.unavailable == 0
    assert outcome.admitted + len(outcome.refusals) == 600
    assert outcome.stopped > 0
    # Of each of the two budgets an admission changes what is held, and an ending changes it again.
    assert history.num_changes >= 4 * outcome.admitted > 0
    assert max(history.most.values()) <= limit
    assert total <= limit
    if greedy == 1.0:
        assert total > limit - TOKEN_COST  # and none left over
    assert used == [(total, 0), (total, 0)]
    for refusal in outcome.refusals:
        left = refusal["limit"] - refusal["used"] - refusal["reserved"]
        assert left < PROMPT_COST + TOKEN_COST, "refused while a lease could be paid"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("loss", ["flush", "flush twice", "stale restart", "state evicted"])
async def test_what_redis_forgets_lets_nobody_spend_twice(books, own_redis, tmp_path: Path, loss: str) -> None:
    limit = 60_000
    principal = await tenant_with(books, limit)
    async with three_gateways(books, own_redis.url, tmp_path) as gateways:
        running = asyncio.create_task(run(gateways, principal, 60, seed=len(loss)))
        await asyncio.sleep(0.6)
        await lose(own_redis, loss, principal.tenant_id)
        if loss == "flush twice":
            await asyncio.sleep(0.7)
            await lose(own_redis, "flush", principal.tenant_id)
        outcome = await running
        await shipped(gateways)
        for _ in range(100):
            if not any(metered.limiter.num_owed for metered in gateways):
                break
            await asyncio.sleep(0.05)
        [(used, held)] = await money(gateways[0], principal)
    total = await charged(books, principal.tenant_id)
    assert outcome.lost == 0
    assert outcome.admitted > 10
    assert total <= limit
    assert (used, held) == (total, 0)
    assert limit - total < TOKEN_COST
    for refusal in outcome.refusals:
        left = refusal["limit"] - refusal["used"] - refusal["reserved"]
        assert left < PROMPT_COST + TOKEN_COST


async def lose(own_redis, loss: str, tenant_id: str) -> None:
    if loss == "stale restart":
        files = own_redis.directory / "appendonlydir"
        own_redis.kill()
        newest = max(files.glob("*.incr.aof"), key=lambda path: path.stat().st_size)
        data = newest.read_bytes()
        newest.write_bytes(data[: len(data) * 2 // 3])
        own_redis.start()
        return
    async with redis.asyncio.Redis.from_url(own_redis.url) as client:
        if loss == "state evicted":
            await client.delete(f"hg:{{t:{tenant_id}}}:s")
        else:
            await client.flushall()


async def test_a_process_that_dies_leaves_nothing_held_and_its_charges_count(books, own_redis, tmp_path: Path) -> None:
    """Its successor finds in the ledger what became of each request that Redis still has as open."""
    principal = await tenant_with(books, 100_000)
    async with three_gateways(books, own_redis.url, tmp_path) as gateways:
        dying = gateways[0]
        charged_one = await dying.admission.admit(ask(principal, 1), "r")
        await dying.admission.admit(ask(principal, 2), "r")
        dying.limiter.owe_settle = _unheard  # Redis never learns of it
        await charged_one.settle("ok", Usage(0, 0, PROMPT, 100), True)
        await dying.shipper.caught_up()
        [(used, held)] = await money(gateways[1], principal)
        assert (used, held) == (0, 2 * (PROMPT_COST + 128 * TOKEN_COST))
        shutil.copytree(tmp_path / "0", tmp_path / "copy")
        async with metering(
            database=books, redis_url=own_redis.url, slot=0, directory=tmp_path / "copy", limiter_timeout_s=10
        ) as successor:
            [(used, held)] = await money(successor, principal)
            assert (used, held) == (PROMPT_COST + 100 * TOKEN_COST, 0)
            dying.limiter.open_reservations.held.clear()


def _unheard(*_: object) -> None:
    return None


async def test_amounts_beyond_what_a_double_can_count_are_refused(sqlite_books, redis_url: str, tmp_path: Path) -> None:
    principal = await tenant_with(sqlite_books, 2**53 - 1)
    from accounting.values.errors import InvalidError

    async with metering(
        database=sqlite_books, redis_url=redis_url, slot=0, directory=tmp_path / "j", limiter_timeout_s=10
    ) as metered:
        holder = LimitSubject.of("req_1", principal, "m", "interactive", now_ms=time.time_ns() // 10**6)
        for cost, rung in ((2**53, 0), (2**53 - 1, 1), (-1, 1), (1, 2**60)):
            with pytest.raises(InvalidError):
                await metered.limiter.reserve(holder, 1, cost, [(1, rung)])
        verdict = await metered.limiter.reserve(holder, 1, 2**53 - 3, [(1, 1)])
        assert (verdict.failing, verdict.reserved) == (None, 2**53 - 2)
        [(used, held)] = await money(metered, principal)
        assert (used, held) == (0, 2**53 - 2)
        refused = await metered.limiter.reserve(dataclasses.replace(holder, request_id="req_2"), 1, 1, [(1, 1)])
        assert refused.failing is not None
        await metered.limiter.settle(holder, 2**53 - 3, 1, 1)
        assert await money(metered, principal) == [(2**53 - 3, 0)]
