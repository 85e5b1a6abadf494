"""Moments and months on the command line, all in UTC."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import click

from accounting.values.errors import InvalidError
from accounting.values.periods import LAST_SECOND, bounds


class Moment(click.ParamType):  # type: ignore[type-arg]  # generic in some versions of click only
    """A parameter type that reads a date, a date with a time, or Unix seconds as Unix seconds."""

    name = "TIME"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        if isinstance(value, int):
            return value
        second = self._second(value, param, ctx)
        if not 0 <= second <= LAST_SECOND:
            self.fail(f"{value!r} is not a time from 1970 to 9999-12-30.", param, ctx)
        return second

    def _second(self, text: str, param: Any, ctx: Any) -> int:
        try:
            if text.isascii() and text.isdigit():
                return int(text)
            moment = datetime.fromisoformat(text)
        except ValueError:
            self.fail(f"{text!r} is not a date such as 2026-10-01 or 2026-10-01T12:00Z.", param, ctx)
        return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())

    @staticmethod
    def shown(second: int) -> str:
        """Formats a moment as it can be typed."""
        return f"{_utc(second):%Y-%m-%dT%H:%MZ}"


class Month(click.ParamType):  # type: ignore[type-arg]  # generic in some versions of click only
    """A parameter type that reads a month such as `2026-10` as its first second and that of the next month."""

    name = "YYYY-MM"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        try:
            return bounds(value)
        except InvalidError as error:
            self.fail(f"{value!r} is not a month: {error}", param, ctx)


def refuse_empty_span(start: int | None, end: int | None) -> None:
    """Refuses a span of time in which nothing can lie."""
    if start is not None and end is not None and start >= end:
        raise click.UsageError("--from must lie before --to.")


MOMENT = Moment()
MONTH = Month()


def moment(second: float) -> str:
    """Formats a moment for a table, in UTC. Every table has this form."""
    return f"{_utc(second):%Y-%m-%d %H:%M:%S}"


def _utc(second: float) -> datetime:
    """Returns the last moment of the calendar in place of a later one, which books of older versions may hold."""
    return datetime.fromtimestamp(min(second, LAST_SECOND), UTC)


def ago(second: float) -> str:
    """Formats how long ago a moment was, in its largest unit."""
    passed = max(0, int(time.time() - second))
    for unit, length in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if passed >= 2 * length or (unit != "days" and passed >= length):
            return f"{passed // length} {unit}"
    return f"{passed} s"
