"""What a limit would have refused, from the rollups of the last week."""

from __future__ import annotations

from typing import Any

import pytest
from money import NOON_MS, posting

from accounting.limits import limit_preview
from accounting.limits.limit_preview import Trial, Use, num_refused, refused_by_hour
from accounting.requests import request_postings
from accounting.values.budget_types import Budget, PeriodKind
from accounting.values.types import Charge, Usage

NOON = NOON_MS // 1000


@pytest.mark.parametrize(
    ("used", "trial", "expected"),
    [
        ((10, 900, 100), Trial(), 0),
        ((10, 900, 100), Trial(10, 1000), 0),
        ((10, 900, 100), Trial(7), 3),
        ((10, 900, 100), Trial(0), 10),
        ((10, 900, 100), Trial(None, 999), 1),
        ((10, 900, 100), Trial(None, 500), 5),
        ((10, 900, 100), Trial(None, 0), 10),
        ((10, 900, 100), Trial(7, 500), 5),
        ((10, 900, 100), Trial(input_tokens_per_minute=450), 5),
        ((10, 900, 100), Trial(output_tokens_per_minute=90), 1),
        ((10, 900, 100), Trial(input_tokens_per_minute=900, output_tokens_per_minute=100), 0),
        ((0, 0, 0), Trial(0, 0), 0),
    ],
)
def test_the_requests_beyond_a_limit_are_refused(used: tuple[int, int, int], trial: Trial, expected: int) -> None:
    assert num_refused(Use(0, *used), trial) == expected


def test_a_day_slides_and_what_was_refused_takes_nothing() -> None:
    """20 requests in each of four hours, half a day apart: every second hour finds the limit used up."""
    hours = [Use(NOON + n * 43_200, 20) for n in range(4)]
    assert [refused for _, refused in refused_by_hour(hours, Trial(requests_per_day=20))] == [0, 20, 0, 20]
    assert [refused for _, refused in refused_by_hour(hours, Trial(requests_per_day=30))] == [0, 10, 0, 10]


def a_budget(limit: int, period: PeriodKind = "day") -> Budget:
    return Budget(id="", tenant_id="proj_a", period=period, limit_micro_units=limit)


def test_a_budget_refuses_from_where_its_period_has_spent_it() -> None:
    hours = [Use(NOON + n * 3_600, 10, charge=100) for n in (0, 1, 2, 12, 13)]  # noon, then midnight

    def refused(limit: int, period: PeriodKind) -> list[int]:
        return [number for _, number in refused_by_hour(hours, Trial(budget=a_budget(limit, period)))]

    assert refused(100, "hour") == [0, 0, 0, 0, 0]
    assert refused(95, "hour") == [1, 1, 1, 1, 1]
    assert refused(150, "day") == [0, 5, 10, 0, 5]
    assert refused(250, "month") == [0, 0, 5, 10, 10]
    assert refused(0, "month") == [10] * 5


async def test_the_minutes_of_one_tenant_and_model_are_counted_within_the_week(conn):
    """Each request has 137 tokens that count: the cached ones do not."""
    days = 86_400_000
    wanted = [
        *((f"burst{n}", {"opened_at_ms": NOON_MS + 30_000}) for n in range(6)),
        *((f"calm{n}", {"opened_at_ms": NOON_MS + n * 60_000}) for n in range(3)),
        ("other model", {"opened_at_ms": NOON_MS, "model": "other"}),
        ("batch", {"opened_at_ms": NOON_MS, "tier": "batch"}),
        ("other tenant", {"opened_at_ms": NOON_MS, "tenant_id": "proj_b"}),
        ("too old", {"opened_at_ms": NOON_MS - 7 * days}),
        ("a day ago", {"opened_at_ms": NOON_MS - days}),
    ]
    usage = Usage(16, 32, 5, 100)
    postings = [posting(f"req_{name}", usage, **changes) for name, changes in wanted]
    await request_postings.post(conn, 1, 1, postings)

    async def seen(trial: Trial) -> tuple[int, int, int | None]:
        found = await limit_preview.preview(conn, "proj_a", trial, NOON + 600)
        assert (found.end - found.start, found.end % 3600) == (7 * 86_400, 0)
        return found.num_requests, found.num_refused, found.num_minutes

    assert await seen(Trial(5)) == (11, 3, 1)
    assert await seen(Trial(5, model="m")) == (10, 2, 1)
    assert await seen(Trial(0, model="m")) == (10, 10, 4)
    assert await seen(Trial(None, 137 * 4, model="m")) == (10, 3, 1)
    assert await seen(Trial(100, 10**9)) == (11, 0, 0)
    assert await seen(Trial(0, model="unknown")) == (0, 0, 0)


async def test_a_key_a_day_and_a_budget_are_tried(conn):
    """A month counts from its first day, although only 7 days are told, and a budget binds batches too."""
    before = NOON_MS - 8 * 86_400_000
    wanted = [
        *((f"mine{n}", {"key_id": "key_a", "opened_at_ms": NOON_MS + n * 60_000}) for n in range(4)),
        *((f"theirs{n}", {"key_id": "key_b", "opened_at_ms": NOON_MS}) for n in range(2)),
        ("batch", {"tier": "batch", "opened_at_ms": NOON_MS}),
        ("before", {"opened_at_ms": before, "charge": Charge(600, 0, 0, 0, 600)}),
    ]
    wanted = [(name, {"charge": Charge(100, 0, 0, 0, 100)} | changes) for name, changes in wanted]
    await request_postings.post(conn, 1, 1, [posting(f"req_{name}", **changes) for name, changes in wanted])

    async def seen(**wanted: Any) -> tuple[int, int, int | None, int]:
        found = await limit_preview.preview(conn, "proj_a", Trial(**wanted), NOON + 600)
        return found.num_requests, found.num_refused, found.num_minutes, found.num_hours

    assert await seen(requests_per_minute=0, key_id="key_a") == (4, 4, 4, 1)
    assert await seen(requests_per_day=1, key_id="key_b") == (2, 1, None, 1)
    assert await seen(requests_per_day=6) == (6, 0, None, 0)
    assert await seen(budget=a_budget(300)) == (7, 4, None, 1)
    assert await seen(budget=a_budget(700, "month")) == (7, 6, None, 1)


async def test_a_models_adapters_and_its_overflow_count_for_it(conn):
    """Its limits bind them. Other names only look like them."""
    names = ("m", "m:legal", "m:overflow", "m:8b:legal", "M:legal", "mm:legal", "m_:legal")
    await request_postings.post(conn, 1, 1, [posting(f"req_{name}", model=name) for name in names])
    for model, number in (("m", 3), ("m:8b", 1), ("m:legal", 1), ("m_", 1)):
        found = await limit_preview.preview(conn, "proj_a", Trial(0, model=model), NOON + 600)
        assert (found.num_requests, found.num_refused) == (number, number), model
