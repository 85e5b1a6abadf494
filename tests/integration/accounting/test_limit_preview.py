"""What a limit would have refused, from the rollups of the last week."""

from __future__ import annotations

import pytest
from money import NOON_MS, posting

from accounting.limits import limit_preview
from accounting.limits.limit_preview import Use, num_refused
from accounting.requests import request_postings
from accounting.values.types import Limits, Usage

NOON = NOON_MS // 1000


@pytest.mark.parametrize(
    ("used", "limits", "expected"),
    [
        ((10, 1000), Limits(), 0),
        ((10, 1000), Limits(10, 1000), 0),
        ((10, 1000), Limits(7), 3),
        ((10, 1000), Limits(0), 10),
        ((10, 1000), Limits(None, 999), 1),
        ((10, 1000), Limits(None, 500), 5),
        ((10, 1000), Limits(None, 0), 10),
        ((10, 1000), Limits(7, 500), 5),
        ((0, 0), Limits(0, 0), 0),
    ],
)
def test_the_requests_beyond_a_limit_are_refused(used: tuple[int, int], limits: Limits, expected: int) -> None:
    assert num_refused(Use(0, *used), limits) == expected


async def test_the_minutes_of_one_tenant_and_model_are_counted_within_the_week(conn):
    """Each request has 153 tokens."""
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

    async def seen(limits: Limits, model: str | None = None) -> tuple[int, int, int]:
        found = await limit_preview.preview(conn, "proj_a", limits, NOON + 600, model)
        assert (found.end - found.start, found.end % 3600) == (7 * 86_400, 0)
        return found.num_requests, found.num_refused, found.num_minutes

    assert await seen(Limits(5)) == (11, 3, 1)
    assert await seen(Limits(5), "m") == (10, 2, 1)
    assert await seen(Limits(0), "m") == (10, 10, 4)
    assert await seen(Limits(None, 153 * 4), "m") == (10, 3, 1)
    assert await seen(Limits(100, 10**9)) == (11, 0, 0)
    assert await seen(Limits(0), "unknown") == (0, 0, 0)


async def test_a_models_adapters_and_its_overflow_count_for_it(conn):
    """Its limits bind them. Other names only look like them."""
    names = ("m", "m:legal", "m:overflow", "m:8b:legal", "M:legal", "mm:legal", "m_:legal")
    await request_postings.post(conn, 1, 1, [posting(f"req_{name}", model=name) for name in names])
    for model, number in (("m", 3), ("m:8b", 1), ("m:legal", 1), ("m_", 1)):
        found = await limit_preview.preview(conn, "proj_a", Limits(0), NOON + 600, model)
        assert (found.num_requests, found.num_refused) == (number, number), model
