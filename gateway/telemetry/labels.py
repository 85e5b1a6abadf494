"""Labels whose values come from outside: a bounded number of values become series, and all others share one."""

from __future__ import annotations

from typing import TypeVar, cast

from prometheus_client.metrics import MetricWrapperBase

Family = TypeVar("Family", bound=MetricWrapperBase)

OTHER = "_other"


class FirstSeen:
    """The first `most` values stay as they are, until the process ends. All later ones are `_other`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: set[str] = set()

    def label(self, value: str) -> str:
        if value in self._known:
            return value
        if len(self._known) >= self._most:
            return OTHER
        self._known.add(value)
        return value


class Series:
    """The series of one process's families, by their labels: the library makes a text of each label and takes a lock at
    each look-up. Labels are bounded, and so are the series.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], MetricWrapperBase] = {}

    def of(self, family: Family, *labels: str) -> Family:
        key = (family, *labels)
        series = self._known.get(key)
        if series is None:
            series = self._known[key] = family.labels(*labels)
        return cast(Family, series)
