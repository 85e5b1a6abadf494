"""Figures of charts: axes have round numbers, bars and lines stand where their values are."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.console import charts, formats

FORECAST = {"low_micro_units": 80_000_000, "expected_micro_units": 90_000_000, "high_micro_units": 100_000_000}


@pytest.mark.parametrize(
    ("most", "labels"),
    [
        (0, ["0", "1"]),
        (1, ["0", "1"]),
        (7, ["0", "2", "4", "6", "8"]),
        (16, ["0", "5", "10", "15", "20"]),
        (45_000, ["0", "20 k", "40 k", "60 k"]),
        (3_900_000, ["0", "1 M", "2 M", "3 M", "4 M"]),
    ],
)
def test_an_axis_ends_at_a_round_number_that_is_no_lower_than_the_highest_value(most: int, labels: list[str]) -> None:
    top, ticks = charts.axis(most, formats.short_count)
    assert top >= most
    assert [tick.label for tick in ticks] == labels
    assert (ticks[0].at, ticks[-1].at) == (100, 0)


@given(st.integers(0, 10**15))
@example(100_000_000_001)
def test_an_axis_has_few_ticks_and_little_room_above_the_values(most: int) -> None:
    top, ticks = charts.axis(most, formats.short_money)
    assert most <= top <= max(4, 2.5 * most)
    assert 2 <= len(ticks) <= charts.NUM_TICKS + 1


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9)), min_size=1, max_size=60))
def test_the_parts_of_a_bar_stand_on_each_other_and_are_as_high_as_their_values(values: list[tuple[int, int]]) -> None:
    drawn = charts.stacked([("", {"a": a, "b": b}) for a, b in values], ("a", "b"), below=[str(n) for n in range(60)])
    top, _ = charts.axis(max(a + b for a, b in values), formats.short_count)
    for (a, b), bar in zip(values, drawn.bars, strict=True):
        assert sum(part.height for part in bar.parts) == pytest.approx(100 * (a + b) / top, abs=0.01)
        assert [part.number for part in bar.parts] == [number for number, value in enumerate((a, b)) if value]
        assert all(0 <= part.y <= 100 for part in bar.parts)
    assert drawn.bars[-1].x + drawn.bars[-1].width == pytest.approx(100, abs=0.2)
    assert len(drawn.marks) <= charts.NUM_MARKS


def test_the_axis_of_requests_has_the_moments_that_its_labels_say_in_utc() -> None:
    """So that the page's script writes them in the viewer's zone, as it does the times of the table."""
    start_s = 1_795_735_860
    buckets = [
        {"start_ms": (start_s + 1800 * n) * 1000, "end_ms": 0, "num_requests": 1, "num_failed": 0} for n in range(48)
    ]
    marks = charts.counted(buckets).marks
    assert [mark.moment for mark in marks] == [start_s + 1800 * n for n in range(0, 48, 7)]
    assert [mark.label for mark in marks] == [formats.iso(mark.moment)[11:16] for mark in marks]
    assert {mark.moment for mark in charts.stacked([("", {})], (), below=["11-26"]).marks} == {None}


def test_a_month_is_drawn_until_now_and_its_forecast_until_the_end() -> None:
    drawn = charts.month([20_000_000, 40_000_000, 60_000_000], 30, 2.5, FORECAST, 150_000_000)
    assert drawn.ticks[-1].label == "150"
    assert drawn.spent.split() == ["0.0,100.0", "3.33,86.67", "6.67,73.33", "8.33,60.0"]
    assert drawn.band.split() == ["8.33,60.0", "100.0,33.33", "100.0,46.67"]
    assert drawn.expected.split() == ["8.33,60.0", "100.0,40.0"]
    assert drawn.cap == 0
    assert charts.month([1], 30, 0.5, None, 10**12).cap is None, "a cap far above would flatten the line"


def test_a_waterfall_has_ticks_at_round_times() -> None:
    phases = [{"name": "queue", "start_ms": 0, "end_ms": 900}, {"name": "decode", "start_ms": 900, "end_ms": 2_780}]
    ticks = charts.time_ticks(phases, 2_780)
    assert [tick.label for tick in ticks] == ["0.00 ms", "1.00 s", "2.00 s"]
    assert ticks[1].at == pytest.approx(100 * 1000 / 2780, abs=0.01)
    assert [one.is_critical for one in charts.waterfall(phases, 2_780)] == [True, True]
    assert len(charts.time_ticks([], 0)) >= 1


def test_an_amount_is_rounded_for_the_eye_and_exact_for_the_pointer() -> None:
    assert formats.amount(155, "USD") == "0.000155 USD"
    assert formats.amount(1_234_567_890, "USD") == '<span title="1,234.567890 USD">1,234.57 USD</span>'
    assert formats.amount(None) == formats.NONE
    assert [formats.short_money(value) for value in (0, 155, 2_500_000, 1e12)] == ["0", "0.000155", "2.5", "1,000,000"]


def test_states_are_coloured_by_what_they_mean() -> None:
    assert [formats.tone(state) for state in (200, 429, 503)] == ["good", "warn", "bad"]
    assert [formats.tone(state) for state in ("ready", "FAILS", "refused", "in progress")] == [
        "good",
        "bad",
        "warn",
        "plain",
    ]
