"""The time zones in which times are shown to tenants. Periods, limits and charges are in UTC whatever the time zone is.
The module is pure."""

from __future__ import annotations

import zoneinfo
from datetime import datetime
from functools import cache

from accounting.values.errors import InvalidError

UTC = "UTC"
_NO_PLACES = {"localtime", "Factory"}
"""Files that machines have among the zones: the first is the machine's own zone, the second stands for one not chosen."""


@cache
def _names() -> frozenset[str]:
    return frozenset(zoneinfo.available_timezones() - _NO_PLACES)


def checked(name: str) -> str:
    """Returns the name. Raises InvalidError if it is no time zone."""
    if name not in _names():
        raise InvalidError("A time zone is a name like Europe/Berlin.", "time_zone")
    return name


def shown(second: int, name: str) -> str:
    """Returns ISO 8601 with the offset that is in force in that zone at that time."""
    return datetime.fromtimestamp(second, zoneinfo.ZoneInfo(name)).isoformat()
