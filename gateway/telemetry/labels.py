"""Labels whose values come from outside: only so many values become series, and all others share one."""

from __future__ import annotations

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
