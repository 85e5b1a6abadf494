"""What the cache kept for tenants, by hour, out of the cache's own integrals."""

from __future__ import annotations

import random
from collections import Counter

from cache.blocks.usage import TenantBlocks, Usage
from workers.engine.reports.residency import HOUR_S, MAX_ROWS, TOLD_FOR_S, ResidencyMeter

HOUR = 1_790_000_000 // HOUR_S * HOUR_S


def meter() -> ResidencyMeter:
    return ResidencyMeter("p", "m", 10)


def rows(made: ResidencyMeter) -> list[tuple[int, str, int, int]]:
    return [(one.hour, one.tenant, one.cache, one.pinned) for report in made.reports() for one in report.hours]


def blocks(held: int, retained: int = 0, pinned: int = 0, num_held: int = 0) -> TenantBlocks:
    return TenantBlocks(num_held, held_block_ms=held, retained_block_ms=retained, pinned_block_ms=pinned)


def test_sums_of_an_hour_rise_and_what_is_pinned_is_not_counted_twice():
    made = meter()
    made.observe({"a": blocks(5, 7, num_held=1)}, HOUR + 1)
    made.observe({"a": blocks(10, 7, 4), "b": blocks(0, 1)}, HOUR + 2)
    assert rows(made) == [(HOUR, "a", 130, 40), (HOUR, "b", 10, 0)]
    assert rows(made) == rows(made)


def test_every_hour_has_its_own_and_is_told_for_a_while_after_its_end():
    made = meter()
    made.observe({"a": blocks(5, num_held=1)}, HOUR + 1)
    made.observe({"a": blocks(9, num_held=1)}, HOUR + HOUR_S)
    assert rows(made) == [(HOUR, "a", 50, 0), (HOUR + HOUR_S, "a", 40, 0)]
    made.observe({"a": blocks(9)}, HOUR + HOUR_S + TOLD_FOR_S + 1)
    assert rows(made) == [(HOUR + HOUR_S, "a", 40, 0)]


def test_who_is_forgotten_and_comes_back_is_counted_from_nothing_and_who_is_left_out_has_not_changed():
    made = meter()
    made.observe({"gone": blocks(0, 5), "limited": TenantBlocks(retained_block_ms=4, quota=9)}, HOUR + 1)
    made.observe({"gone": blocks(0, 2)}, HOUR + 2)
    made.observe({"limited": TenantBlocks(retained_block_ms=5, quota=9)}, HOUR + 3)
    assert rows(made) == [(HOUR, "gone", 70, 0), (HOUR, "limited", 50, 0)]


def test_each_block_millisecond_of_tenants_that_come_and_go_is_reported_once():
    clock = [0]
    usage, made, rng, kept, expected = Usage(lambda: clock[0]), meter(), random.Random(1), Counter(), Counter()
    for step in range(3000):
        clock[0] += (elapsed := rng.randrange(5))
        expected.update({tenant: number * elapsed for tenant, number in kept.items()})
        tenant = f"t{rng.randrange(50)}"
        if rng.random() < 0.5 and kept[tenant]:
            usage.change(tenant, retained=-kept.pop(tenant))
        else:
            usage.change(tenant, retained=1)
            kept[tenant] += 1
        if step % 7 == 0:
            made.observe(usage.look(), HOUR + 1)
            assert set(usage.tenants()) == set(+kept)
    made.observe(usage.look(), HOUR + 1)
    assert {tenant: cached // 10 for _, tenant, cached, _ in rows(made)} == dict(+expected)


def test_many_tenants_come_in_several_frames():
    made = meter()
    made.observe({f"t{n}": blocks(1) for n in range(2 * MAX_ROWS + 1)}, HOUR)
    assert [len(report.hours) for report in made.reports()] == [MAX_ROWS, MAX_ROWS, 1]
