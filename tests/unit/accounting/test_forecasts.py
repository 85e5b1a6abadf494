"""The forecast of a month: the mean of recent days, within a band of low and high days."""

from __future__ import annotations

from accounting.billing.forecasts import Forecast, forecast, percentile

DAY = 86_400


def test_a_steady_spender_is_forecast_exactly():
    assert forecast(500, [100] * 28, 5 * DAY, 30 * DAY) == Forecast(3_000, 3_000, 3_000, 28)


def test_the_band_prices_the_days_left_by_a_low_and_a_high_day():
    recent = [*range(10, 290, 10)]  # 28 days: 10, 20, … 280
    found = forecast(1_000, recent, 20 * DAY, 30 * DAY)
    assert found == Forecast(1_000 + 1_450, 1_000 + 10 * 30, 1_000 + 10 * 260, 28)


def test_days_before_the_first_charge_do_not_count():
    found = forecast(30, [0] * 25 + [10, 0, 20], 0, 2 * DAY)
    assert found == Forecast(30 + 20, 30, 30 + 40, 3)


def test_only_the_last_28_days_count():
    assert forecast(0, [10**9] * 5 + [1] * 28, 0, DAY) == Forecast(1, 1, 1, 28)


def test_a_part_of_a_day_is_priced_as_a_part():
    assert forecast(0, [86_400], 0, 1_000) == Forecast(1_000, 1_000, 1_000, 1)


def test_the_mean_lies_within_the_band_even_if_one_day_was_very_dear():
    found = forecast(0, [0, 1] + [0] * 25 + [10_000], 0, DAY)
    assert found is not None
    assert found.low <= found.expected <= found.high


def test_nothing_is_forecast_from_nothing():
    assert forecast(7, [], 0, DAY) is None
    assert forecast(7, [0] * 28, 0, DAY) is None


def test_a_month_that_is_over_costs_what_was_spent():
    assert forecast(70, [5, 5], 31 * DAY, 30 * DAY) == Forecast(70, 70, 70, 2)


def test_a_percentile_is_one_of_the_values():
    assert percentile([3, 1, 2], 10) == 1
    assert percentile([3, 1, 2], 90) == 3
    assert percentile([4], 50) == 4
    assert percentile(list(range(1, 11)), 90) == 9
