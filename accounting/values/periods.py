"""Billing periods: the months of UTC, written `2026-10`. The module is pure. Times are Unix seconds, intervals
half-open."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from functools import lru_cache

from accounting.values.errors import InvalidError

DAY_S = 86_400
LAST_SECOND = 253_402_214_399
"""The latest moment that anything may name: calendars end with the year 9999, and a time zone may add a day."""
_PERIOD = re.compile(r"(?P<year>20\d\d)-(?P<month>0[1-9]|1[0-2])", re.ASCII)


def bounds(period: str) -> tuple[int, int]:
    """Returns the first second of the period, and the first second of the next one. Raises InvalidError."""
    match = _PERIOD.fullmatch(period)
    if match is None:
        raise InvalidError("A period is a month of 2000 to 2099, written like 2026-10.", "period")
    year, month = int(match["year"]), int(match["month"])
    following = (year + 1, 1) if month == 12 else (year, month + 1)
    return _first_second(year, month), _first_second(*following)


def period_of(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m")


def date_of(second: int) -> str:
    """Returns the date in UTC, like `2026-10-31`."""
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%d")


def month_start(second: int) -> int:
    return _month_of_day(second // DAY_S)


def _first_second(year: int, month: int) -> int:
    return int(datetime(year, month, 1, tzinfo=UTC).timestamp())


@lru_cache(maxsize=1024)
def _month_of_day(day: int) -> int:
    date = datetime.fromtimestamp(day * DAY_S, UTC)
    return _first_second(date.year, date.month)
