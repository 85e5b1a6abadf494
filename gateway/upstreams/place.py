"""One upstream as this gateway knows it: its breaker, what runs there, and what has become of attempts. Pure."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from gateway.upstreams.breaker import Breaker, State
from gateway.upstreams.outcomes import Fault
from gateway.upstreams.wires.values import Upstream


class Place:
    def __init__(self, upstream: Upstream, clock: Callable[[], float] = time.monotonic) -> None:
        self.upstream = upstream
        self.breaker = Breaker()
        self.num_running = 0
        self.attempts: Counter[str] = Counter()
        """The number of attempts by their end: `delivered`, `cut`, or the reason of the failure."""
        self.drift: Counter[str] = Counter()
        """Tokens by the name of their drift."""
        self.expected_cost = 0
        """Micro-units, since the start of the process."""
        self.first_token_s = 0.0
        """A moving average of the time to the first token; 0: not known."""
        self._clock = clock

    @property
    def state(self) -> State:
        return self.breaker.state(self._clock())

    @property
    def takes_work(self) -> bool:
        return self.breaker.lets_through(self._clock()) and self.num_running < self.upstream.source.max_running

    @property
    def wait_s(self) -> float:
        return self.breaker.wait_s(self._clock())

    def begin(self) -> None:
        self.num_running += 1
        self.breaker.sent(self._clock())

    def end(self) -> None:
        self.num_running -= 1

    def delivered(self, first_token_s: float) -> None:
        self.breaker.succeeded()
        weight = 0.2 if self.first_token_s else 1.0
        self.first_token_s += weight * (first_token_s - self.first_token_s)
        self.attempts["delivered"] += 1

    def cut(self) -> None:
        self.breaker.undecided()
        self.attempts["cut"] += 1

    def failed(self, fault: Fault) -> None:
        now = self._clock()
        self.attempts[fault.reason] += 1
        if fault.blame == "client":
            self.breaker.succeeded()  # it has answered
        elif fault.blame == "rate":
            self.breaker.told_to_wait(now, fault.wait_s)
        else:
            self.breaker.failed(now, fault.reason, at_once=fault.blame == "credential")
            if fault.wait_s > 1:
                self.breaker.told_to_wait(now, fault.wait_s)
