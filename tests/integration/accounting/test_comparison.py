"""Why a charge changed: what was planted comes first, the parts add up to the micro-unit, and only sums are read."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from money import posting
from sqlalchemy import event, text

from accounting.billing import credits, residency
from accounting.billing.credits import NewCredit
from accounting.billing.residency import HOUR_S, Reading
from accounting.comparison import causes, period_sums
from accounting.comparison.period_sums import Interval, Intervals
from accounting.database.db import Database
from accounting.ledger import rollups
from accounting.prices import prices, pricing
from accounting.requests import request_postings
from accounting.tenants import tenants
from accounting.values import periods
from accounting.values.errors import ConflictError, InvalidError, NotFoundError
from accounting.values.periods import DAY_S, bounds
from accounting.values.types import Rates, Usage

BEFORE, AFTER = Interval(*bounds("2025-09")), Interval(*bounds("2025-10"))
MONTHS = Intervals(BEFORE, AFTER)
NOW = AFTER.end + 90 * DAY_S
ISSUED = {"actor": "key_admin"}

SMALL = Rates(cache_read=100_003, cache_write=1_250_001, uncached=1_000_007, output=4_000_009)


def times(rates: Rates, percent: int) -> Rates:
    return Rates(*(getattr(rates, name) * percent // 100 for name in rates.__struct_fields__))


SHEET = {
    ("small", "interactive"): SMALL,
    ("small", "batch"): times(SMALL, 50),
    ("large", "interactive"): times(SMALL, 800),
    ("large", "batch"): times(SMALL, 400),
}


@dataclass
class World:
    """A tenant whose requests vary by a tenth around what a scenario says."""

    db: Database
    chance: random.Random
    tenant: str = ""
    num_posted: int = 0
    others: list[str] = field(default_factory=list)

    async def begin(self) -> None:
        async with self.db.write() as conn:
            await prices.create_sheet(conn, prices.DEFAULT_SHEET, "USD", 1)
            await prices.add_version(conn, prices.DEFAULT_SHEET, SHEET, 1000, residency={"small": (700_000, 900_000)})
            self.tenant = (await tenants.create(conn, "acme", now=1)).id
            self.others = [(await tenants.create(conn, "other", now=1)).id]
        # Another tenant's requests are in the same sums, and in nobody's causes but its own.
        await self.use(BEFORE, tenant=self.others[0], output=9_000)
        await self.use(AFTER, tenant=self.others[0], requests=3)

    async def use(
        self,
        interval: Interval,
        *,
        requests: int = 30,
        prompt: int = 2_000,
        cached: int = 50,
        written: int = 20,
        output: int = 300,
        model: str = "small",
        tier: str = "interactive",
        key: str = "key_a",
        tenant: str = "",
    ) -> None:
        """`cached` and `written` are percent of the prompt."""
        made = []
        async with self.db.write() as conn:
            for _ in range(requests):
                opened_ms = self.chance.randrange(interval.start * 1000, interval.end * 1000)
                price = await prices.price_for(conn, tenant or self.tenant, model, tier, opened_ms)
                assert price is not None
                length = self.near(prompt)
                read, kept = length * cached // 100, length * written // 100
                usage = Usage(read, kept, length - read - kept, self.near(output))
                made.append(
                    posting(
                        f"req_{self.num_posted:06d}",
                        usage,
                        tenant_id=tenant or self.tenant,
                        key_id=key,
                        model=model,
                        tier=tier,
                        opened_at_ms=opened_ms,
                        ended_at_ms=opened_ms + 900,
                        price_version=price.version,
                        charge=pricing.charge(usage, price.rates),
                    )
                )
                self.num_posted += 1
            await request_postings.post(conn, 0, self.num_posted, made, now_ms=interval.start * 1000)

    def near(self, value: int) -> int:
        return self.chance.randint(value * 9 // 10, value * 11 // 10)

    async def new_version(self, percent: int, start: int) -> None:
        async with self.db.write() as conn:
            rates = {name: times(rate, percent) for name, rate in SHEET.items()}
            await prices.add_version(conn, prices.DEFAULT_SHEET, rates, start * 1000)

    async def own_sheet(self, percent: int, start: int) -> None:
        async with self.db.write() as conn:
            await prices.create_sheet(conn, "own", "USD", 1)
            rates = {name: times(rate, percent) for name, rate in SHEET.items()}
            await prices.add_version(conn, "own", rates, 1000)
            await prices.assign(conn, self.tenant, "own", start * 1000)

    async def corrected(self, percent: int, at: int) -> None:
        """That much of every charge of the month before is taken back."""
        async with self.db.write() as conn:
            query = text("SELECT request_id, charge FROM ledger_entry WHERE tenant_id = :t AND opened_at_ms < :end")
            for row in (await conn.execute(query, {"t": self.tenant, "end": AFTER.start * 1000})).all():
                wanted = NewCredit(
                    type="adjustment",
                    tenant_id=self.tenant,
                    amount=row.charge * percent // 100,
                    corrects=row.request_id,
                )
                await credits.create(conn, wanted, key=row.request_id, now_ms=at * 1000, **ISSUED)

    async def kept(self, interval: Interval, gigabytes: int, hours: int = 24) -> None:
        async with self.db.write() as conn:
            for hour in range(interval.start, interval.start + hours * HOUR_S, HOUR_S):
                held = gigabytes * 10**9 * HOUR_S * 1000
                await residency.note(conn, [Reading(hour, self.tenant, "small", "p1", held, 0)])
            await residency.charge_due(conn, (interval.start + (hours + 1) * HOUR_S) * 1000)

    async def read(self, intervals: Intervals = MONTHS, **only: Any) -> period_sums.Periods:
        async with self.db.read() as conn:
            return await period_sums.read(conn, self.tenant, intervals, **only)

    async def ledger(self, interval: Interval, **only: str) -> int:
        """What the ledger's own rows say that was charged."""
        where = " AND ".join(["tenant_id = :tenant", *(f"{name} = :{name}" for name in only)])
        during = {"tenant": self.tenant, "start": interval.start * 1000, "end": interval.end * 1000, **only}
        usage = (
            f"SELECT sum(charge) FROM ledger_entry WHERE {where} AND kind IN ('settle', 'reversal')"
            " AND opened_at_ms >= :start AND opened_at_ms < :end"
        )
        others = (
            "SELECT sum(amount) FROM ledger_leg JOIN ledger_entry USING (request_id, kind, attempt)"
            f" WHERE {where} AND account = 'tenant_receivable' AND kind IN ('residency', 'adjustment', 'credit_note')"
            " AND opened_at_ms >= :start AND opened_at_ms < :end"
        )
        async with self.db.read() as conn:
            sums = [await conn.scalar(text(query), during) for query in ([usage] if only else [usage, others])]
        return sum(int(one or 0) for one in sums)


Play = Callable[[World], Awaitable[Any]]


@dataclass
class Scenario:
    cause: causes.Cause
    direction: int
    play: Play
    intervals: Intervals = MONTHS
    only: dict[str, str] = field(default_factory=dict)


SCENARIOS: dict[str, Scenario] = {}


def planted(cause: causes.Cause, direction: int, **how: Any) -> Callable[[Play], Play]:
    def add(play: Play) -> Play:
        SCENARIOS[play.__name__] = Scenario(cause, direction, play, **how)
        return play

    return add


@planted("volume", 1)
async def volume_doubled(world: World) -> None:
    await world.use(BEFORE)
    await world.use(AFTER, requests=60)


@planted("volume", -1)
async def volume_fell_while_prompts_grew(world: World) -> None:
    await world.use(BEFORE, requests=60)
    await world.use(AFTER, requests=15, prompt=3_000)


@planted("prompt_length", 1)
async def longer_prompts(world: World) -> None:
    await world.use(BEFORE)
    await world.use(AFTER, prompt=6_000)


@planted("prompt_length", -1)
async def prompts_were_trimmed(world: World) -> None:
    await world.use(BEFORE, prompt=9_000)
    await world.use(AFTER, prompt=1_000, output=400)


@planted("output_length", 1)
async def longer_outputs(world: World) -> None:
    await world.use(BEFORE)
    await world.use(AFTER, output=1_200)


@planted("output_length", -1)
async def shorter_outputs(world: World) -> None:
    await world.use(BEFORE, output=2_000)
    await world.use(AFTER, output=100)


@planted("cache", 1)
async def cache_share_fell(world: World) -> None:
    await world.use(BEFORE, prompt=8_000, cached=90, written=5)
    await world.use(AFTER, prompt=8_000, cached=10, written=50)


@planted("cache", -1)
async def cache_share_rose(world: World) -> None:
    await world.use(BEFORE, prompt=8_000, cached=0, written=0)
    await world.use(AFTER, prompt=8_000, cached=95, written=5)


@planted("price", 1)
async def new_price_list(world: World) -> None:
    await world.new_version(160, AFTER.start)
    await world.use(BEFORE)
    await world.use(AFTER)


@planted("price", 1)
async def new_price_list_from_the_middle_of_the_month(world: World) -> None:
    await world.new_version(300, AFTER.start + 10 * DAY_S)
    await world.use(BEFORE)
    await world.use(AFTER)


@planted("price", -1)
async def negotiated_discount(world: World) -> None:
    await world.own_sheet(30, AFTER.start)
    await world.use(BEFORE)
    await world.use(AFTER, requests=36)


@planted("model_mix", 1)
async def switch_to_a_dearer_model(world: World) -> None:
    await world.use(BEFORE)
    await world.use(AFTER, model="large")


@planted("model_mix", 1)
async def new_model_takes_a_third(world: World) -> None:
    await world.use(BEFORE)
    await world.use(AFTER, requests=20)
    await world.use(AFTER, requests=10, model="large")


@planted("model_mix", -1)
async def dear_model_vanished(world: World) -> None:
    await world.use(BEFORE, requests=20)
    await world.use(BEFORE, requests=10, model="large")
    await world.use(AFTER, requests=30)


@planted("volume", 1)
async def burst_of_a_leaked_key(world: World) -> None:
    await world.use(BEFORE)
    await world.use(AFTER)
    day = Interval(AFTER.start + 12 * DAY_S, AFTER.start + 13 * DAY_S)
    await world.use(day, requests=150, key="key_leaked", output=200)


@planted("tier_mix", 1)
async def from_batch_to_online(world: World) -> None:
    await world.use(BEFORE, tier="batch")
    await world.use(AFTER)


@planted("tier_mix", -1)
async def most_moved_to_batch(world: World) -> None:
    await world.use(BEFORE)
    await world.use(AFTER, requests=5)
    await world.use(AFTER, requests=25, tier="batch")


@planted("prompt_length", 1)
async def prompts_more_than_volume(world: World) -> None:
    await world.use(BEFORE)
    await world.use(AFTER, requests=38, prompt=5_500)


@planted("output_length", 1)
async def outputs_against_a_cheaper_list(world: World) -> None:
    await world.new_version(80, AFTER.start)
    await world.use(BEFORE)
    await world.use(AFTER, output=1_500)


@planted("period_length", 1, intervals=Intervals(Interval(BEFORE.start, BEFORE.start + 7 * DAY_S), AFTER))
async def a_month_against_a_week(world: World) -> None:
    await world.use(Interval(BEFORE.start, BEFORE.start + 7 * DAY_S), requests=14)
    await world.use(AFTER, requests=62)


@planted("volume", 1)
async def new_tenant(world: World) -> None:
    await world.use(AFTER, model="large")


@planted("volume", -1)
async def tenant_stopped(world: World) -> None:
    await world.use(BEFORE, tier="batch")


@planted("corrections", -1)
async def credits_given(world: World) -> None:
    await world.use(BEFORE)
    await world.use(AFTER)
    await world.corrected(60, AFTER.start + DAY_S)


@planted("residency", 1)
async def kept_kv_is_charged(world: World) -> None:
    await world.use(BEFORE)
    await world.use(AFTER)
    await world.kept(AFTER, 40)


@planted("output_length", 1, only={"key_id": "key_b"})
async def outputs_of_one_key_while_all_fell(world: World) -> None:
    await world.use(BEFORE, requests=90)
    await world.use(BEFORE, key="key_b")
    await world.use(AFTER, requests=10)
    await world.use(AFTER, key="key_b", output=1_500)


@planted("prompt_length", 1, only={"model": "large"})
async def prompts_of_one_model_while_another_was_dropped(world: World) -> None:
    await world.use(BEFORE, requests=90)
    await world.use(BEFORE, requests=20, model="large")
    await world.use(AFTER, requests=20, model="large", prompt=7_000)


ON_POSTGRESQL = ("new_price_list", "switch_to_a_dearer_model", "credits_given", "kept_kv_is_charged", "new_tenant")
BOTH = [
    *(pytest.param("sqlite", name, id=name) for name in SCENARIOS),
    *(pytest.param("postgresql", name, id=f"{name}-postgresql", marks=pytest.mark.rest) for name in ON_POSTGRESQL),
]
on_sqlite = pytest.mark.parametrize("migrated_url", ["sqlite"], indirect=True)


@pytest.fixture
async def world(db: Database, request: pytest.FixtureRequest) -> World:
    made = World(db, random.Random(request.node.name))
    await made.begin()
    return made


@pytest.mark.parametrize(("migrated_url", "name"), BOTH, indirect=["migrated_url"])
async def test_what_was_planted_comes_first_and_the_parts_add_up(world, name):
    scenario = SCENARIOS[name]
    await scenario.play(world)
    periods = await world.read(scenario.intervals, **scenario.only)
    found = causes.change(periods.before, periods.after)
    assert found.first_cause == scenario.cause, found.parts
    assert found.parts[0].amount * scenario.direction > 0
    # To the micro-unit against the ledger.
    for amount, interval in zip((found.before, found.after), scenario.intervals, strict=True):
        assert amount == await world.ledger(interval, **scenario.only)
    assert sum(part.amount for part in found.parts) == found.after - found.before != 0
    amounts = {part.cause: part.amount for part in found.parts}
    for one in found.models:
        assert sum(part.amount for part in one.parts) == one.after - one.before
    by_model = {c: sum(p.amount for one in found.models for p in one.parts if p.cause == c) for c in amounts}
    assert {**amounts, "corrections": 0} == by_model
    # A request is rounded by half a micro-unit at most, a part of a model by less than one.
    assert abs(amounts["rounding"]) <= world.num_posted / 2 + len(found.models)
    turned = await world.read(Intervals(*reversed(scenario.intervals)), **scenario.only)
    back = causes.change(turned.before, turned.after)
    assert {part.cause: -part.amount for part in back.parts} == amounts
    assert back.first_cause == found.first_cause


def test_there_are_scenarios_enough():
    assert len(SCENARIOS) >= 20
    assert {one.cause for one in SCENARIOS.values()} == {*causes.CAUSES} - {"rounding"}


@on_sqlite
async def test_the_leaked_key_and_the_dear_model_are_named(world):
    await burst_of_a_leaked_key(world)
    periods = await world.read()
    assert [one.key_id for one in periods.keys] == ["key_leaked", "key_a"]
    assert periods.keys[0].before == 0
    assert sum(one.after - one.before for one in periods.keys) == periods.after.charge - periods.before.charge
    only = await world.read(key_id="key_leaked")
    assert [one.key_id for one in only.keys] == ["key_leaked"]


@on_sqlite
async def test_the_same_prices_have_no_effect_and_equal_periods_no_causes(world):
    await volume_doubled(world)
    periods = await world.read()
    amounts = {part.cause: part.amount for part in causes.change(periods.before, periods.after).parts}
    assert (amounts["price"], amounts["model_mix"], amounts["tier_mix"], amounts["residency"]) == (0, 0, 0, 0)
    same = causes.change(periods.after, periods.after)
    assert (same.first_cause, {part.amount for part in same.parts}) == (None, {0})


@on_sqlite
async def test_a_reversed_request_is_in_no_sum(world):
    await world.use(BEFORE)
    await world.use(AFTER)
    whole = (await world.read()).after
    async with world.db.write() as conn:
        await request_postings.reverse(conn, [f"req_{world.num_posted - 1:06d}"], "sdk_retry")
    rest = (await world.read()).after
    assert rest.lines[0].num_requests == whole.lines[0].num_requests - 1
    assert rest.charge == await world.ledger(AFTER) < whole.charge


@pytest.mark.parametrize("only", [{"key_id": "key_of_nobody"}, {"model": "no-such-model"}, {"key_id": ""}])
@on_sqlite
async def test_what_is_unknown_has_zeros_and_no_cause(world, only):
    await volume_doubled(world)
    await world.use(AFTER, tenant=world.others[0], key="key_of_another")
    for one in (only, {"key_id": "key_of_another"}):
        periods = await world.read(**one)
        found = causes.change(periods.before, periods.after)
        assert (found.before, found.after, found.first_cause, found.models) == (0, 0, None, ())
        assert ({part.amount for part in found.parts}, periods.keys, periods.currency) == ({0}, [], "USD")


@on_sqlite
async def test_an_unknown_tenant_is_refused(world):
    world.tenant = "proj_none"
    with pytest.raises(NotFoundError):
        await world.read()


@on_sqlite
async def test_two_currencies_are_not_added_up(world):
    await volume_doubled(world)
    async with world.db.write() as conn:
        await request_postings.post(conn, 0, 10**6, [_in_euro(world.tenant)])
    with pytest.raises(ConflictError, match="more than one currency"):
        await world.read()


def _in_euro(tenant: str) -> Any:
    return posting("req_eur", tenant_id=tenant, currency="EUR", opened_at_ms=AFTER.start * 1000)


@on_sqlite
async def test_periods_of_any_minutes_are_the_ledgers(world):
    """They are covered by months, days, hours and minutes: each request counts once."""
    await world.use(BEFORE, requests=150)
    await world.use(AFTER, requests=150)
    for _ in range(12):
        cuts = sorted(world.chance.randrange(BEFORE.start, AFTER.end) // 60 * 60 for _ in range(4))
        if len(set(cuts)) == 4:
            asked = Intervals(Interval(*cuts[:2]), Interval(*cuts[2:]))
            periods = await world.read(asked)
            assert [periods.before.charge, periods.after.charge] == [await world.ledger(one) for one in asked]


SUMS = {"rollup_minute", "rollup_hour", "rollup_day", "rollup_month", "residency_charge", "credit"}


async def test_only_sums_are_read_and_each_by_its_index(db, request):
    """So it takes as long with ten million rows of the ledger as with none."""
    world = World(db, random.Random(1))
    await world.begin()
    await kept_kv_is_charged(world)
    odd = Intervals(Interval(BEFORE.start + 3_660, AFTER.start - 60), Interval(AFTER.start + 7_320, AFTER.end - 120))
    statements: list[tuple[str, Any]] = []

    def note(conn, cursor, statement, parameters, context, many) -> None:
        statements.append((statement, parameters))

    async with db.read() as conn:
        sync = conn.sync_connection
        event.listen(sync, "before_cursor_execute", note)
        for intervals in (MONTHS, odd):
            for only in ({}, {"key_id": "key_a"}, {"model": "small"}):
                await period_sums.read(conn, world.tenant, intervals, **only)
        event.remove(sync, "before_cursor_execute", note)
        joined = " ".join(statement for statement, _ in statements)
        assert {name for name in SUMS if name in joined} >= SUMS
        for raw in ("ledger_entry", "ledger_leg", "engine_record", "request_log"):
            assert raw not in joined
        if db.dialect == "sqlite":
            for statement, parameters in statements:
                plan = [row[3] for row in (await conn.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters))]
                scanned = {step.split()[1] for step in plan if step.startswith("SCAN")}
                assert not scanned & SUMS, plan
                found = [step for step in plan if step.startswith("SEARCH rollup")]
                assert all("(bucket=? AND tenant_id=?" in step for step in found), plan


@pytest.mark.parametrize("seed", range(20))
def test_few_buckets_cover_a_period_without_gap_or_overlap(seed):
    chance = random.Random(seed)
    start = chance.randrange(BEFORE.start, AFTER.end) // 60 * 60
    end = start + chance.choice([1, 59, 61, 1_441, 44_000, 366 * 1_440]) * 60
    found = rollups.covering(start, end)
    buckets = sorted((bucket, span) for span, mine in found.items() for bucket in mine)
    ends = [
        periods.month_start(bucket + 31 * DAY_S) if span == "month" else bucket + rollups.SECONDS[span]
        for bucket, span in buckets
    ]
    assert [start, *ends] == [*(bucket for bucket, _ in buckets), end]
    assert all(rollups.bucket_of(span, bucket) == bucket for bucket, span in buckets)
    assert len(buckets) < 240


DAY = 86_400


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ((10 * DAY, 20 * DAY, None, None), ((0, 10 * DAY), (10 * DAY, 20 * DAY))),
        ((10 * DAY, None, 5 * DAY, None), ((5 * DAY, 95 * DAY), (10 * DAY, 100 * DAY))),
        ((10 * DAY + 59, 20 * DAY + 61, 60, 119), ((60, 60), None)),
        ((99 * DAY, 120 * DAY, None, None), ((98 * DAY, 99 * DAY), (99 * DAY, 100 * DAY))),
        ((110 * DAY, 120 * DAY, 1 * DAY, 2 * DAY), ((1 * DAY, 2 * DAY), (110 * DAY, 120 * DAY))),
        ((1 * DAY, 2 * DAY, 3 * DAY, 4 * DAY), ((3 * DAY, 4 * DAY), (1 * DAY, 2 * DAY))),
        ((119, 301, 0, 61), ((0, 60), (60, 300))),
    ],
)
def test_periods_are_whole_minutes_and_end_now_at_the_latest(asked, expected):
    if expected[1] is None:
        with pytest.raises(InvalidError):
            period_sums.intervals(*asked, now=100 * DAY + 59)
    else:
        assert period_sums.intervals(*asked, now=100 * DAY + 59) == expected


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ((20 * DAY, 10 * DAY, None, None), "start_time"),
        ((10 * DAY, 10 * DAY, None, None), "start_time"),
        ((10 * DAY, 10 * DAY + 59, None, None), "start_time"),
        ((-1, 10 * DAY, None, None), "start_time"),
        ((10 * DAY, 2**60, None, None), "start_time"),
        ((101 * DAY, None, None, None), "start_time"),
        ((10 * DAY, 30 * DAY, None, None), "before_start_time"),
        ((10 * DAY, 20 * DAY, 5 * DAY, 4 * DAY), "before_start_time"),
        ((10 * DAY, 20 * DAY, None, 4 * DAY), "before_end_time"),
        ((10 * DAY, 20 * DAY, 0, 400 * DAY), "before_end_time"),
        ((10 * DAY, 10 * DAY + 367 * DAY, 0, None), "end_time"),
    ],
)
def test_periods_that_cannot_be_are_refused_by_name(asked, param):
    with pytest.raises(InvalidError) as refused:
        period_sums.intervals(*asked, now=1000 * DAY if asked[1] else 100 * DAY)
    assert refused.value.param == param
