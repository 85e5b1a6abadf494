"""Spans of time on a page: days, hours or minutes in UTC, and the finer span that a click on one of them leads to.

The functions are pure. Times are Unix seconds; in addresses they are written `2026-11-20T13:00`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

Width = Literal["day", "hour", "minute"]
SECONDS: dict[Width, int] = {"day": 86_400, "hour": 3_600, "minute": 60}
API_WIDTHS: dict[Width, str] = {"day": "1d", "hour": "1h", "minute": "1m"}
FINER: dict[Width, Width] = {"day": "hour", "hour": "minute"}
USUAL: dict[Width, int] = {"day": 30, "hour": 24, "minute": 60}
"""The number of bars of a page that was asked for without an end."""
MOST: dict[Width, int] = {"day": 31, "hour": 168, "minute": 1440}
_WRITTEN = re.compile(r"(\d{4}-\d\d-\d\d)(?:T(\d\d:\d\d))?(?::\d\d)?Z?", re.ASCII)
_LAST = 4_102_444_800
"""The first second of 2100."""


@dataclass(frozen=True, slots=True)
class Span:
    """Whole buckets of one width: [start, end)."""

    width: Width
    start: int
    end: int

    @property
    def starts(self) -> Sequence[int]:
        """The starts of its buckets."""
        return range(self.start, self.end, SECONDS[self.width])


def span_of(width: str, start: str, end: str, now: int) -> Span:
    """Reads a span. Without a start it ends now. Raises ValueError with a sentence for the person who typed it."""
    wanted: Width = width if width in SECONDS else "day"
    seconds = SECONDS[wanted]
    first = read(start) if start else None
    last = read(end) if end else None
    if first is None:
        until = now + 1 if last is None else last
        first = until + -until % seconds - USUAL[wanted] * seconds
    first -= first % seconds
    if last is None:
        last = min(first + USUAL[wanted] * seconds, max(now + 1, first + seconds))
    last += -last % seconds
    if last <= first:
        raise ValueError("The end of the time must lie after its start.")
    if (last - first) // seconds > MOST[wanted]:
        raise ValueError(f"A page shows at most {MOST[wanted]} {wanted}s: choose a shorter time or wider bars.")
    return Span(wanted, first, last)


def read(text: str) -> int:
    """Reads a moment in UTC. Raises ValueError."""
    match = _WRITTEN.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        at = datetime.fromisoformat(f"{match[1]}T{match[2] or '00:00'}").replace(tzinfo=UTC)
        second = int(at.timestamp())
    except ValueError:
        raise ValueError("A time is written like 2026-11-20 or 2026-11-20T13:00, in UTC.") from None
    if not 0 <= second < _LAST:
        raise ValueError("A time must lie between 1970 and 2100.")
    return second


def written(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M")


def label(width: Width, second: int) -> str:
    form = {"day": "%Y-%m-%d", "hour": "%Y-%m-%d %H:00", "minute": "%Y-%m-%d %H:%M"}[width]
    return datetime.fromtimestamp(second, UTC).strftime(form)
