"""The circuit breaker of one upstream. The module is pure: the time is an argument.

Closed, it lets everything through. After `MOST_FAILURES` failures in a row it is open, and nothing is sent for a time
that doubles with each further failure. After that time it is half open: one request tries, and decides.
"""

from __future__ import annotations

from typing import Literal

State = Literal["closed", "open", "half_open"]
MOST_FAILURES = 5
FIRST_WAIT_S, LONGEST_WAIT_S = 2.0, 60.0
LONGEST_RETRY_AFTER_S = 600.0
"""A provider's Retry-After is believed up to this."""


class Breaker:
    def __init__(self) -> None:
        self.num_failures = 0
        """Failures in a row."""
        self.reason = ""
        """The reason why it opened last; a fixed word."""
        self._open_until = 0.0
        self._busy_until = 0.0
        """The provider has asked to wait until then."""
        self._tries = False

    def state(self, now: float) -> State:
        if self.num_failures < MOST_FAILURES:
            return "closed"
        return "open" if now < self._open_until else "half_open"

    def lets_through(self, now: float) -> bool:
        """Says whether a request may be sent now."""
        if now < self._busy_until:
            return False
        state = self.state(now)
        return state == "closed" or (state == "half_open" and not self._tries)

    def wait_s(self, now: float) -> float:
        """Returns how long it lets nothing through."""
        opens = self._open_until if self.num_failures >= MOST_FAILURES else 0.0
        return max(0.0, opens - now, self._busy_until - now)

    def sent(self, now: float) -> None:
        self._tries = self.state(now) == "half_open"

    def succeeded(self) -> None:
        self.num_failures, self._tries = 0, False

    def failed(self, now: float, reason: str, *, at_once: bool = False) -> None:
        """Counts a failure. `at_once` opens it without waiting for more: the credential is refused."""
        self._tries = False
        self.num_failures = max(self.num_failures + 1, MOST_FAILURES if at_once else 0)
        if self.num_failures < MOST_FAILURES:
            return
        self.reason = reason
        wait_s = FIRST_WAIT_S * 2 ** min(10, self.num_failures - MOST_FAILURES)
        self._open_until = now + min(LONGEST_WAIT_S, wait_s)

    def told_to_wait(self, now: float, seconds: float) -> None:
        """The provider limits our rate: this is no failure of it."""
        self._tries = False
        self._busy_until = max(self._busy_until, now + min(LONGEST_RETRY_AFTER_S, max(0.0, seconds)))

    def undecided(self) -> None:
        """The request ended without a word about the upstream, because our client left."""
        self._tries = False
