"""Charges to a budget's period: exact whatever its bounds are, and read from few buckets."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from money import posting
from sqlalchemy import event

from accounting.limits import spend
from accounting.requests import request_postings
from accounting.values.budget_types import MAX_AMOUNT, Budget, Period
from accounting.values.types import Charge

MINUTE_MS, DAY_MS = 60_000, 86_400_000
MARCH_MS = 1_709_251_200_000
"""2024-03-01T00:00:00Z"""
BUDGET = Budget(id="b", tenant_id="proj_a", period="fixed", limit_micro_units=10**9)


@pytest.mark.parametrize(
    "period",
    [
        Period(MARCH_MS - 400 * DAY_MS + 31 * MINUTE_MS, MARCH_MS + 500 * DAY_MS + 59 * MINUTE_MS),
        Period(MARCH_MS, MARCH_MS + 31 * DAY_MS),
        Period(MARCH_MS + 5 * MINUTE_MS, MARCH_MS + 6 * MINUTE_MS),
        Period(MARCH_MS - 330 * MINUTE_MS, MARCH_MS + 365 * DAY_MS - 330 * MINUTE_MS),
        Period(0, MAX_AMOUNT // MINUTE_MS * MINUTE_MS),
    ],
    ids=["odd minutes", "a month", "a minute", "a year in India", "without end"],
)
async def test_what_began_in_the_period_is_summed(conn, period: Period) -> None:
    """At its edges, in its middle, and at the edges of the month; each charge is another power of two."""
    times = [
        period.start_ms - 1,
        period.start_ms,
        MARCH_MS - 1,
        MARCH_MS,
        MARCH_MS + 5 * MINUTE_MS,
        MARCH_MS + 40 * DAY_MS,
    ]
    times += [at for at in (period.end_ms - 1, period.end_ms) if at < 2**40 * 4]
    given = {max(at, 0): 2**place for place, at in enumerate(times)}
    postings = [
        posting(f"req_{charge}", opened_at_ms=at, ended_at_ms=at + 5, charge=Charge(charge, 0, 0, 0, charge))
        for at, charge in given.items()
    ]
    await request_postings.post(conn, 0, 1, postings)
    others = [posting("req_other", opened_at_ms=MARCH_MS, tenant_id="proj_b", charge=Charge(2**40, 0, 0, 0, 2**40))]
    await request_postings.post(conn, 0, 2, others)
    wanted = sum(charge for at, charge in given.items() if period.start_ms <= at < period.end_ms)
    assert await spend.spent(conn, BUDGET, period) == wanted > 0


async def test_a_year_that_begins_at_half_past_an_hour_reads_some_two_hundred_buckets(conn) -> None:
    """It read every minute of the year, of all tenants, in each posting."""
    bound: list[Any] = []
    connection = conn.sync_connection
    event.listen(connection, "before_cursor_execute", lambda *args: bound.append(args[3]))
    half_past = Period(MARCH_MS - 330 * MINUTE_MS, MARCH_MS + 365 * DAY_MS - 330 * MINUTE_MS)
    await spend.spent(conn, BUDGET, half_past)
    assert len(bound) <= 4, "one statement for each width"
    given = [list(values.values()) if isinstance(values, dict) else values for values in bound]
    buckets = [msgspec.json.decode(last) if isinstance(last, str) else last for *_, last in given]
    assert 12 <= sum(map(len, buckets)) <= 250
