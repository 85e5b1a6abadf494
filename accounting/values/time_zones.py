"""How moments are shown to a tenant: periods, limits and charges are of UTC whatever its time zone is. Pure."""

from __future__ import annotations

import zoneinfo
from datetime import datetime
from functools import cache

from accounting.values.errors import InvalidError

UTC = "UTC"


@cache
def _names() -> frozenset[str]:
    return frozenset(zoneinfo.available_timezones())


def checked(name: str) -> str:
    """Raises InvalidError."""
    if name not in _names():
        raise InvalidError("A time zone is a name like Europe/Berlin.", "time_zone")
    return name


def shown(second: int, name: str) -> str:
    """ISO 8601 with the offset that is in force there then."""
    return datetime.fromtimestamp(second, zoneinfo.ZoneInfo(name)).isoformat()
