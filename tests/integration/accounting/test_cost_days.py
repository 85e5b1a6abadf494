"""Bills of providers by the day and by the row, in both dialects: one process pulls, corrections are kept, and nothing
is unnamed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy import insert, text
from sqlalchemy.exc import DBAPIError, IntegrityError

from accounting.books import books
from accounting.database.db import Database
from accounting.tables.upstream_models import UpstreamCall, UpstreamCostDay
from accounting.upstreams import cost_days, cost_pulls, costs, upstreams
from accounting.upstreams.cost_days import ComparedDay
from accounting.upstreams.cost_pulls import Claim, DayCost
from accounting.upstreams.costs import CostRow
from accounting.values import clock
from accounting.values.periods import DAY_S
from accounting.values.types import TOKEN_CLASSES

TODAY = clock.now_ms() // 1000 // DAY_S * DAY_S
OLD, LATE = TODAY - 10 * DAY_S, TODAY - DAY_S
FIRST = TODAY - 20 * DAY_S
COUNTS = {f"{kind}_{name}": 1 for kind in ("stated", "judged") for name in TOKEN_CLASSES}


@pytest.fixture(autouse=True)
def days_of_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """The days are counted from the day on which a test runs: midnight may pass after this file was imported."""
    passed_s = clock.now_ms() // 1000 // DAY_S * DAY_S - TODAY
    for name in ("TODAY", "FIRST", "OLD", "LATE"):
        monkeypatch.setitem(globals(), name, globals()[name] + passed_s)


async def call(conn: Any, number: int, day: int, cost: int, **changes: Any) -> None:
    values = {
        "request_id": f"req_{number}",
        "attempt": 0,
        "tenant_id": "operator",
        "upstream": "u",
        "model": "m",
        "state": "delivered",
        "started_at_ms": day * 1000 + 5,
        "provider_id": f"id-{number}",
        "has_statement": True,
        **COUNTS,
        "drift": "",
        "expected_cost": cost,
        "stated_cost": None,
    }
    await conn.execute(insert(UpstreamCall).values(**(values | changes)))


async def pulled(db: Database, costs: Sequence[DayCost], upstream: str = "u") -> int | None:
    async with db.write() as conn:
        claimed = await cost_pulls.claim(conn, upstream)
    assert claimed is not None
    async with db.write() as conn:
        written = await cost_pulls.succeeded(conn, claimed, costs)
    return None if written is None else written.num_changed


async def days(db: Database, upstream: str = "u") -> dict[int, ComparedDay]:
    async with db.read() as conn:
        return {one.facts.day: one for one in (await cost_days.compare(conn)).get(upstream, [])}


async def failures(db: Database) -> dict[str, tuple[str, ...]]:
    async with db.read() as conn:
        report = await books.verify(conn)
    return {one.id: one.failures for one in report.equations if not one.ok}


@pytest.fixture
async def called(db: Database) -> Database:
    """A database with calls: one on the first day, three on an old day, one yesterday and one today."""
    async with db.write() as conn:
        await call(conn, 0, FIRST, 50)
        for number, cost in enumerate((100, 200, 300)):
            await call(conn, 1 + number, OLD, cost, state=("delivered", "cut", "delivered")[number])
        await call(conn, 4, LATE, 70)
        await call(conn, 5, TODAY, 80)
    return db


async def test_days_are_compared_and_named(called: Database) -> None:
    number = await pulled(
        called,
        [
            DayCost(FIRST, "in", "USD", 51),
            DayCost(OLD, "in", "USD", 400),
            DayCost(OLD, "out", "USD", 500),
            DayCost(OLD, "credit", "USD", -30),
            DayCost(OLD, "in", "EUR", 7),
            DayCost(OLD + DAY_S, "in", "USD", 9),
            DayCost(LATE, "in", "USD", 60),
        ],
    )
    assert number == 7
    found = await days(called)
    assert {day: (one.account, one.drift, one.matched) for day, one in found.items()} == {
        FIRST: ("rounding", 1, 50),
        OLD: ("over", 300, 600),
        OLD + DAY_S: ("unknown", 9, 0),
        LATE: ("late", -10, 60),
        TODAY: ("open", -80, 0),
    }
    old = found[OLD].facts
    assert (old.billed, old.credit, dict(old.others), old.num_calls, old.num_unsure) == (900, -30, {"EUR": 7}, 3, 1)
    assert await failures(called) == {}


async def test_a_report_is_read_again_and_corrections_are_kept(called: Database) -> None:
    first = [DayCost(OLD, "in", "USD", 400), DayCost(OLD, "gone", "USD", 5)]
    assert await pulled(called, first) == 2
    assert await pulled(called, first) == 0
    assert await pulled(called, [DayCost(OLD, "in", "USD", 600), DayCost(OLD, "late row", "USD", 1)]) == 3
    assert await pulled(called, [DayCost(OLD, "in", "USD", 600), DayCost(OLD, "late row", "USD", 1)]) == 0
    assert await pulled(called, first) == 3
    async with called.read() as conn:
        lines = await cost_days.lines(conn, "u", OLD)
    assert [(one.line_item, one.revision, one.amount) for one in lines] == [
        ("gone", 1, 5),
        ("gone", 2, 0),
        ("gone", 3, 5),
        ("in", 1, 400),
        ("in", 2, 600),
        ("in", 3, 400),
        ("late row", 1, 1),
        ("late row", 2, 0),
    ]
    day = (await days(called))[OLD]
    assert (day.facts.billed, day.facts.num_corrections) == (405, 5)
    assert await failures(called) == {}


async def test_a_day_of_which_too_much_is_stated_is_passed_over(
    called: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost_pulls, "MAX_DAY_ROWS", 4)
    other = [DayCost(FIRST, name, "USD", 1) for name in "abcd"]
    assert await pulled(called, [*other, *(DayCost(OLD, name, "USD", 1) for name in "abc")]) == 7
    async with called.read() as conn:
        before = (await cost_pulls.states(conn, ["u"]))["u"]
    assert before.fault == ""
    await asyncio.sleep(0.01)
    cheaper = [DayCost(FIRST, "a", "USD", 0), *other[1:]]
    # Of the old day a correction and two lines that are gone; of the other day one that is as long as it may be.
    monkeypatch.setattr(cost_pulls, "MAX_DAY_ROWS", 5)
    assert await pulled(called, [*cheaper, DayCost(OLD, "a", "USD", 2)]) == 1
    assert (await days(called))[OLD].facts.billed == 3
    async with called.read() as conn:
        state = (await cost_pulls.states(conn, ["u"]))["u"]
    assert state.fault == "too_many_lines"
    assert state.pulled_at_ms > before.pulled_at_ms, "later pulls leave the day behind"
    other = cheaper
    corrected = [DayCost(OLD, name, "USD", 2 if name == "a" else 1) for name in "abc"]
    assert await pulled(called, [*other, *corrected]) == 1
    assert await failures(called) == {}


async def test_one_process_pulls_at_a_time(called: Database) -> None:
    async def claim() -> Claim | None:
        async with called.write() as conn:
            return await cost_pulls.claim(conn, "u")

    claims = [one for one in await asyncio.gather(*(claim() for _ in range(6))) if one is not None]
    assert len(claims) == 1
    assert (claims[0].since, claims[0].until) == (FIRST, TODAY)
    async with called.write() as conn:
        await conn.execute(text("UPDATE upstream_cost_pull SET claimed_until_ms = claimed_until_ms - 400000"))
    again = await claim()
    assert again is not None, "a claim ends with its process"
    async with called.write() as conn:
        assert await cost_pulls.succeeded(conn, claims[0], [DayCost(OLD, "in", "USD", 1)]) is None
        await cost_pulls.failed(conn, claims[0], "stalled")
        assert await cost_pulls.succeeded(conn, again, [DayCost(OLD, "in", "USD", 2)]) == cost_pulls.Written(1)
    assert (await days(called))[OLD].facts.billed == 2
    async with called.write() as conn:
        assert await cost_pulls.claim(conn, "u", period_ms=3_600_000) is None, "the last pull has just ended"


async def test_a_failed_pull_keeps_what_was_read_and_the_next_one_leaves_no_day_out(called: Database) -> None:
    await pulled(called, [DayCost(OLD, "in", "USD", 600)])
    async with called.write() as conn:
        claimed = await cost_pulls.claim(conn, "u")
        assert claimed is not None
        await cost_pulls.failed(conn, claimed, "rate_limited")
        state = (await cost_pulls.states(conn, ["u", "never"]))["u"]
        assert (state.fault, state.first_day, state.pulled_at_ms > 0) == ("rate_limited", FIRST, True)
        await conn.execute(text("UPDATE upstream_cost_pull SET pulled_at_ms = pulled_at_ms - 86400000 * 20"))
        claimed = await cost_pulls.claim(conn, "u")
        assert claimed is not None
        assert claimed.since == FIRST
    found = await days(called)
    assert (found[OLD].account, found[LATE].account) == ("", "open"), "yesterday was not over when the bill was read"


async def test_an_upstream_that_is_not_read_is_not_compared(called: Database) -> None:
    assert await days(called) == {}
    async with called.write() as conn:
        claimed = await cost_pulls.claim(conn, "u")
        assert claimed is not None
        await cost_pulls.failed(conn, claimed, "credential")
    assert await days(called) == {}
    assert await failures(called) == {}


async def test_another_price_sheets_currency_is_compared(called: Database) -> None:
    async with called.write() as conn:
        await conn.execute(text("INSERT INTO price_sheet (id, currency, created_at) VALUES ('standard', 'EUR', 1)"))
    await pulled(called, [DayCost(OLD, "in", "USD", 600), DayCost(OLD, "in", "EUR", 500)])
    day = (await days(called))[OLD]
    assert (day.account, day.drift, dict(day.facts.others)) == ("under", -100, {"USD": 600})
    assert await failures(called) == {}


async def test_statements_of_a_provider_are_never_edited(called: Database) -> None:
    await pulled(called, [DayCost(OLD, "in", "USD", 600)])
    for statement in ("UPDATE upstream_cost_day SET amount = 1", "DELETE FROM upstream_cost_day"):
        async with called.write() as conn:
            with pytest.raises(DBAPIError, match="append-only"):
                await conn.execute(text(statement))
            await conn.rollback()


def line(day: int, revision: int, amount: int = 5, upstream: str = "u") -> dict[str, Any]:
    place = {"upstream": upstream, "day": day, "line_item": "in", "currency": "USD", "revision": revision}
    return {**place, "amount": amount, "pulled_at_ms": 1}


@pytest.mark.parametrize(
    ("row", "named"),
    [
        (line(OLD, 3), "statement is missing"),
        (line(FIRST - DAY_S, 1), "before the first day"),
        (line(OLD, 1, upstream="nobody"), "of an upstream that was never read"),
    ],
)
async def test_a_statement_that_is_missing_or_not_compared_is_found(
    called: Database, row: dict[str, Any], named: str
) -> None:
    await pulled(called, [DayCost(OLD, "in", "USD", 600)])
    async with called.write() as conn:
        await conn.execute(insert(UpstreamCostDay).values(**row))
    assert set(await failures(called)) == {"I22"}, named


async def test_a_row_of_no_day_is_refused(called: Database) -> None:
    async with called.write() as conn:
        with pytest.raises(IntegrityError):
            await conn.execute(insert(UpstreamCostDay).values(**line(OLD + 1, 1)))
        await conn.rollback()


async def test_credentials_are_sealed_with_another_master_key(db: Database) -> None:
    old, new = b"o" * 32, b"n" * 32
    async with db.write() as conn:
        key = upstreams.sealing_key(old)
        await upstreams.add(conn, "a", {}, "one", key=key, now=1, actor="x", cost_credential="two")
        await upstreams.add(conn, "b", {}, "", key=key, now=1, actor="x")
        assert await upstreams.is_wrapped(conn, old)
        assert await upstreams.rewrap(conn, old, new) == 2
        assert (await upstreams.is_wrapped(conn, old), await upstreams.is_wrapped(conn, new)) == (False, True)
        key = upstreams.sealing_key(new)
        found = {
            one.name: (upstreams.opened(key, one), upstreams.opened_for_costs(key, one))
            for one in await upstreams.all_stored(conn)
        }
    assert found == {"a": ("one", "two"), "b": ("", "")}


async def test_a_row_without_a_call_of_ours_hides_no_call_that_has_no_row(db: Database) -> None:
    """A provider bills a fee, and a call failed before the provider gave it an id: they are not each other's."""
    async with db.write() as conn:
        await call(conn, 1, OLD, 700, provider_id="")
        await costs.add(conn, "u", [CostRow("fee", "", 40, OLD * 1000)], OLD * 1000, "operator")
        [found] = await costs.sums(conn)
        assert (found.drift, found.unbilled, found.num_unbilled) == ({"unknown": 40}, 700, 1)
        assert await costs.unjudged(conn) == []


async def test_calls_and_rows_without_an_id_keep_no_row_from_its_call(db: Database, monkeypatch: Any) -> None:
    monkeypatch.setattr(costs, "AT_ONCE", 3)
    async with db.write() as conn:
        rows = [CostRow(f"a{number}", "", 1, OLD * 1000) for number in range(2)]
        await costs.add(conn, "u", [*rows, CostRow("late", "id-9", 500, OLD * 1000)], OLD * 1000, "operator")
        for number in range(2):
            await call(conn, number, OLD, 0, provider_id="")
        await call(conn, 9, OLD, 500)
        await costs.judge_again(conn)
        [found] = await costs.sums(conn)
        assert (found.matched, found.drift) == (500, {"unknown": 2})
