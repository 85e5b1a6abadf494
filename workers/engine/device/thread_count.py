"""How many threads a step gets, chosen by what steps of its size take with more of them and with fewer.

Two threads take half the time of one if the step is large and the machine has a core for each. A small step is over
before the second thread has begun, and where other programs have the cores, threads wait for each other's pieces and a
step takes several times as long as with one. Neither can be asked of the system: a container sees numbers that are not
its own. So it is measured, again and again, with steps that are computed anyway.

The module is pure: it knows times and counts. A row has the same bits with any number of threads (ADR 60).
"""

from __future__ import annotations

from dataclasses import dataclass

WINDOW_S = 0.05
"""Time of steps with one number of threads after which their mean counts."""
LEAST_STEPS = 4
"""Least number of steps of a window. A single step says nothing where others compute."""
GAIN = 0.9
"""More threads are taken if their steps take at most this part of the time. Fewer are taken if theirs take no more: the
cores that become free serve the gateway."""
HOPELESS = 1.5
"""A trial ends after two steps if they take more than this multiple."""
SLOWER = 1.5
"""Multiple of the mean since the last trial at which the next trial comes at once: other programs have begun."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 16.0
"""Time between two trials. It doubles while trials show nothing better."""
LEAST_PAUSE = 32
"""The pause after a trial is at least this multiple of the trial, however long its steps are."""


@dataclass(slots=True)
class _Window:
    """Steps that had the same number of threads."""

    threads: int
    seconds: float = 0.0
    num_steps: int = 0

    @property
    def mean(self) -> float:
        return self.seconds / self.num_steps


class _Size:
    """The choice for steps of one size. It keeps one number of threads and tries half and double of it in turn."""

    def __init__(self, most: int) -> None:
        self._most, self._kept = most, most
        self._window = _Window(most)
        self._usual: float | None = None
        """Seconds of a step in the window that the last trial was compared with, or in the first one."""
        self._halves = True
        self._pause, self._trial_at = 0.0, 0.0

    @property
    def threads(self) -> int:
        return self._window.threads

    def add(self, threads: int, seconds: float, now: float) -> None:
        if threads != self._window.threads:
            return  # it was begun before the number changed
        self._window.seconds += seconds
        self._window.num_steps += 1
        if threads == self._kept:
            self._judge_kept(now)
        else:
            self._judge_trial(now)

    def _is_full(self) -> bool:
        return self._window.seconds >= WINDOW_S and self._window.num_steps >= LEAST_STEPS

    def _judge_kept(self, now: float) -> None:
        if not self._is_full():
            return
        mean = self._window.mean
        if self._usual is not None and now < self._trial_at and mean < SLOWER * self._usual:
            self._window = _Window(self._kept)
            return
        if self._usual is not None and mean >= SLOWER * self._usual:
            self._pause = 0.0
        self._usual = mean
        self._window = _Window(self._other())

    def _judge_trial(self, now: float) -> None:
        assert self._usual is not None
        tried, mean = self._window.threads, self._window.mean
        hopeless = self._window.num_steps > 1 and mean > HOPELESS * self._usual
        if not (self._is_full() or hopeless):
            return
        if mean <= self._usual * (GAIN if tried > self._kept else 1.0):
            self._kept, self._usual, self._pause = tried, mean, FIRST_PAUSE_S
        else:
            self._halves = not self._halves
            self._pause = min(max(FIRST_PAUSE_S, 2 * self._pause), LONGEST_PAUSE_S)
        self._trial_at = now + max(self._pause, LEAST_PAUSE * self._window.seconds)
        self._window = _Window(self._kept)

    def _other(self) -> int:
        """Returns half or double of the number that is kept, whichever there is and is due."""
        half, double = self._kept // 2, min(2 * self._kept, self._most)
        if self._kept == self._most:
            return half
        return half if self._halves and half else double


class ThreadCount:
    def __init__(self, most: int) -> None:
        """Creates the choice between `most` threads, half of them, and so on down to one."""
        self._most = most
        self._sizes: dict[int, _Size] = {}
        """Keyed by the bits of the number of tokens: a size goes from one power of two to the next."""

    def of(self, num_tokens: int) -> int:
        """Returns the number of threads for a step of so many tokens."""
        return self._size(num_tokens).threads

    def add(self, num_tokens: int, threads: int, seconds: float, now: float) -> None:
        """Notes that a step took so long with a number of threads. `now` is of any clock that runs evenly, in
        seconds."""
        if self._most > 1:
            self._size(num_tokens).add(threads, seconds, now)

    def _size(self, num_tokens: int) -> _Size:
        return self._sizes.setdefault(num_tokens.bit_length(), _Size(self._most))
