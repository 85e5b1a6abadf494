"""When an hour of a key is unusual, what it looks like, and what made it dear."""

from __future__ import annotations

import pytest

from accounting.anomalies.bands import Band, band
from accounting.anomalies.findings import DAY_S, HOUR_S, Finding, KeyUse, Sums, judge

HOUR = 1_700_000_000 - 1_700_000_000 % DAY_S + 15 * HOUR_S
USUAL = Sums(100, 5_000, 5_000, 2_000, 1_000_000)


def test_the_band_is_that_of_the_modified_z_score() -> None:
    """Median 100, deviations 0, 10, 10, 20, 20, 30, 900: the MAD is 20, and 3.5 * 20 / 0.6745 = 103.8."""
    assert band([100, 90, 110, 80, 120, 70, 1000], 0) == Band(100, 300), "three times the median is more"
    past = [100, 20, 180, 20, 180, 20, 180]
    assert band(past, 0) == Band(100, 515)
    assert band(past, 600) == Band(100, 600)


def test_a_steady_past_and_a_silent_one_have_room() -> None:
    assert band([100] * 28, 30) == Band(100, 300)
    assert band([0] * 28, 30) == Band(0, 30)
    assert band([5] * 6, 30) is None


def use(now: Sums, past: Sums | None = USUAL, days: int = 28, new_models: tuple[str, ...] = ()) -> KeyUse:
    by_hour = {HOUR - day * DAY_S: past for day in range(1, days + 1) if past is not None}
    return KeyUse(HOUR - days * DAY_S, {**by_hour, HOUR: now}, new_models)


def found(*args: object, **how: object) -> Finding:
    finding = judge(use(*args, **how), [HOUR])  # type: ignore[arg-type]
    assert finding is not None
    return finding


def test_what_is_usual_is_no_finding() -> None:
    assert judge(use(USUAL), [HOUR]) is None
    assert judge(use(Sums(300, 15_000, 15_000, 6_000, 3_000_000)), [HOUR]) is None, "three times is within the band"
    assert judge(use(Sums(30, 0, 9, 9, 100_000), past=None), [HOUR]) is None, "little is never much"
    assert judge(use(USUAL, new_models=("new",)), [HOUR]) is None, "a new model alone is no anomaly"


def test_a_young_key_is_not_judged() -> None:
    assert judge(use(Sums(9_999, 0, 1, 1, 10**9), days=6), [HOUR]) is None
    assert judge(use(Sums(9_999, 0, 1, 1, 10**9), days=7), [HOUR]) is not None


def test_one_loud_day_of_the_past_hides_nothing() -> None:
    loud = use(Sums(400, 20_000, 20_000, 8_000, 4_000_000))
    past = {**loud.by_hour, HOUR - 3 * DAY_S: Sums(100_000, 0, 10**9, 10**9, 10**12)}
    assert judge(KeyUse(loud.created_at, past), [HOUR]) is not None


@pytest.mark.parametrize(
    ("finding", "suspicion", "signals"),
    [
        (found(Sums(400, 0, 400, 400, 1_000)), "more_requests", ("more_requests",)),
        (found(Sums(400, 0, 400, 400, 4_000_000)), "spend_spike", ("more_requests", "more_spend")),
        (found(Sums(100, 0, 10**6, 10**6, 4_000_000)), "spend_spike", ("more_spend",)),
        (
            found(Sums(400, 0, 400, 400, 4_000_000), new_models=("new",)),
            "leaked_key",
            ("more_requests", "more_spend", "new_model"),
        ),
        (found(Sums(31, 0, 400, 400, 1), past=None), "leaked_key", ("more_requests", "silent_hour")),
    ],
)
def test_a_key_looks_leaked_if_it_asks_more_and_does_something_new(
    finding: Finding, suspicion: str, signals: tuple[str, ...]
) -> None:
    assert (finding.suspicion, finding.signals) == (suspicion, signals)


@pytest.mark.parametrize(
    ("now", "new_models", "cause"),
    [
        (Sums(1_000, 50_000, 50_000, 20_000, 10_000_000), (), "more_requests"),
        (Sums(100, 50_000, 50_000, 20_000, 10_000_000), (), "longer_requests"),
        (Sums(150, 0, 18_000, 0, 10_000_000), (), "less_from_cache"),
        (Sums(100, 5_000, 5_000, 2_000, 10_000_000), ("large",), "new_model"),
        (Sums(100, 2_000, 2_000, 8_000, 10_000_000), (), "larger_share_of_output"),
        (Sums(100, 5_000, 5_000, 2_000, 10_000_000), (), "price_per_token"),
    ],
)
def test_the_first_cause_is_the_largest_factor(now: Sums, new_models: tuple[str, ...], cause: str) -> None:
    assert found(now, new_models=new_models).cause == cause


def test_a_rise_from_nothing_is_of_requests() -> None:
    assert found(Sums(100, 0, 10**6, 10**6, 4_000_000), past=None).cause == "more_requests"


def test_the_peak_is_the_dearest_of_several_hours() -> None:
    both = use(Sums(400, 0, 400, 400, 5_000_000))
    before = HOUR - HOUR_S
    hours = {before: Sums(900, 0, 400, 400, 4_000_000)} | both.by_hour
    hours |= {before - day * DAY_S: USUAL for day in range(1, 29)}
    finding = judge(KeyUse(both.created_at - DAY_S, hours), [before - HOUR_S, before, HOUR])
    assert finding is not None
    assert (finding.hours, finding.peak) == ((before, HOUR), HOUR)
