"""Finds stop strings in a stream of pieces. It holds back text that may still begin a stop string, and reports
when one is complete.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """A matcher of stop strings. The string that is complete first wins; of several that end at the same place, the
    longest.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include_stop
        self._held = ""

    @property
    def num_held(self) -> int:
        return len(self._held)

    def push(self, piece: str) -> tuple[str, str | None]:
        """Adds a piece. Returns (text that may go out, the stop string that ended it or None). After an end, push no
        more.
        """
        text = self._held + piece
        # A stop string cannot be complete before the new piece begins.
        found = self._first_end(text, len(self._held))
        if found is not None:
            end, stop = found
            self._held = ""
            return text[: end if self._include else end - len(stop)], stop
        keep = self._num_open(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """Returns the held text at the end of the text: it is no stop string after all."""
        text, self._held = self._held, ""
        return text

    def _first_end(self, text: str, num_old: int) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, num_old - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[0], best[2])

    def _num_open(self, text: str) -> int:
        """Returns the length of the longest end of `text` that some stop string begins with."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if stop.startswith(text[len(text) - size :]):
                    longest = size
                    break
        return longest
