"""The band within which an hour is usual: the median and the median absolute deviation (MAD) of the same hours of the
days before. The module is pure.

An hour is beyond the band if its modified z-score, 0.6745 (x - median) / MAD, is above 3.5. Score and cutoff are those
of Iglewicz and Hoaglin, "How to Detect and Handle Outliers" (1993). Single outliers in the past move neither median nor
MAD. A key that did the same each day has a MAD of 0, so the band is also at least three times the median and an amount
that is worth a look.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec

CUTOFF = 3.5
SCALE = 0.6745
"""The ratio of MAD and standard deviation in a normal distribution."""
TIMES_MEDIAN = 3
MIN_DAYS = 7
"""Fewer days of past say nothing."""


class Band(msgspec.Struct, frozen=True):
    usual: int
    """The median of the same hours."""
    upper: int
    """The most that is still usual."""


def band(past: Sequence[int], least: int) -> Band | None:
    """Returns the band of an hour. `past` has one value for each day before, 0 for a silent hour. An hour with at most
    `least` is always usual. None means that there is too little past."""
    if len(past) < MIN_DAYS:
        return None
    middle = median(past)
    deviation = median(abs(value - middle) for value in past)
    upper = max(middle + CUTOFF * deviation / SCALE, TIMES_MEDIAN * middle, least)
    return Band(round(middle), int(upper))
