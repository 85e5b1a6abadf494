"""What the cache kept for tenants, by hour, out of the cache's own integrals."""

from __future__ import annotations

from cache.blocks.usage import TenantBlocks
from workers.engine.reports.residency import HOUR_S, MAX_ROWS, TOLD_FOR_S, ResidencyMeter

HOUR = 1_790_000_000 // HOUR_S * HOUR_S


def meter() -> ResidencyMeter:
    return ResidencyMeter("p", "m", 10)


def rows(made: ResidencyMeter) -> list[tuple[int, str, int, int]]:
    return [(one.hour, one.tenant, one.cache, one.pinned) for report in made.reports() for one in report.hours]


def blocks(held: int, retained: int = 0, pinned: int = 0) -> TenantBlocks:
    return TenantBlocks(held_block_ms=held, retained_block_ms=retained, pinned_block_ms=pinned)


def test_sums_of_an_hour_rise_and_what_is_pinned_is_not_counted_twice():
    made = meter()
    made.observe({"a": blocks(5, 7)}, HOUR + 1)
    made.observe({"a": blocks(10, 7, 4), "b": blocks(0, 1)}, HOUR + 2)
    assert rows(made) == [(HOUR, "a", 130, 40), (HOUR, "b", 10, 0)]
    assert rows(made) == rows(made)


def test_every_hour_has_its_own_and_is_told_for_a_while_after_its_end():
    made = meter()
    made.observe({"a": blocks(5)}, HOUR + 1)
    made.observe({"a": blocks(9)}, HOUR + HOUR_S)
    assert rows(made) == [(HOUR, "a", 50, 0), (HOUR + HOUR_S, "a", 40, 0)]
    made.observe({"a": blocks(9)}, HOUR + HOUR_S + TOLD_FOR_S + 1)
    assert rows(made) == [(HOUR + HOUR_S, "a", 40, 0)]


def test_many_tenants_come_in_several_frames():
    made = meter()
    made.observe({f"t{n}": blocks(1) for n in range(2 * MAX_ROWS + 1)}, HOUR)
    assert [len(report.hours) for report in made.reports()] == [MAX_ROWS, MAX_ROWS, 1]
