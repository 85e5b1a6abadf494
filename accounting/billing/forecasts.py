"""The probable cost of a month: what was spent so far, and the mean of recent days for the time that is left.

The method is simple on purpose, so that a reader can repeat it. Recent days are the last 28 whole days, from the first
day with a charge on. The band prices all of the time that is left by a low day (the 10th percentile) and by a high day
(the 90th), so it is wide rather than narrow: real days are not all low or all high. The module is pure. Amounts are in
micro-units, times are Unix seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from accounting.values.periods import DAY_S

NUM_DAYS = 28
LOW_PERCENTILE, HIGH_PERCENTILE = 10, 90


class Forecast(msgspec.Struct, frozen=True):
    """The amount of the whole month. `num_days` is the number of recent days that it rests on."""

    expected: int
    low: int
    high: int
    num_days: int


def forecast(spent: int, recent: Sequence[int], now: int, month_end: int) -> Forecast | None:
    """Returns the forecast, or None without a recent day. `spent` is the month's amount so far; `recent` has the
    amounts of the last whole days, oldest first."""
    days = _since_first_charge(recent[-NUM_DAYS:])
    if not days:
        return None
    left_s = max(0, month_end - now)
    mean, low, high = (
        sum(days) * left_s // (len(days) * DAY_S),
        percentile(days, LOW_PERCENTILE) * left_s // DAY_S,
        percentile(days, HIGH_PERCENTILE) * left_s // DAY_S,
    )
    # A few very dear days can lift the mean above the 90th percentile, and refunds can press it below the 10th.
    return Forecast(spent + mean, spent + min(low, mean), spent + max(high, mean), len(days))


def percentile(values: Sequence[int], percent: int) -> int:
    """Returns the least value that `percent` of all values do not exceed (the nearest rank)."""
    rank = -(-len(values) * percent // 100)
    return sorted(values)[max(rank, 1) - 1]


def _since_first_charge(days: Sequence[int]) -> Sequence[int]:
    first = next((i for i, amount in enumerate(days) if amount), len(days))
    return days[first:]
