"""One upstream as this gateway knows it: its breakers, what runs there, and what has become of attempts. The module is
pure.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable

from gateway.upstreams.breaker import Breaker, State
from gateway.upstreams.outcomes import Fault
from gateway.upstreams.wires.values import Upstream

STATES: tuple[State, ...] = ("closed", "half_open", "open")
"""The better ones first."""


class Place:
    """An upstream with its breakers: one for the address and one for each model, so that a failing model closes no
    other."""

    def __init__(self, upstream: Upstream, clock: Callable[[], float] = time.monotonic) -> None:
        self.upstream = upstream
        self.breaker = Breaker()
        """The breaker of the address and its credential."""
        self.of_models: defaultdict[str, Breaker] = defaultdict(Breaker)
        """The breakers of the models, by the names under which they are served."""
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
    def worst(self) -> Breaker:
        """The breaker that says most of what is wrong here."""
        now = self._clock()
        return max((self.breaker, *self.of_models.values()), key=lambda one: STATES.index(one.state(now)))

    @property
    def state(self) -> State:
        return self.worst.state(self._clock())

    @property
    def longest_wait_s(self) -> float:
        """The time for which it lets nothing through for its worst model."""
        now = self._clock()
        return max(one.wait_s(now) for one in (self.breaker, *self.of_models.values()))

    def takes_work(self, served: str) -> bool:
        now = self._clock()
        has_room = self.num_running < self.upstream.source.max_running
        return has_room and self.breaker.lets_through(now) and self.of_models[served].lets_through(now)

    def wait_s(self, served: str) -> float:
        now = self._clock()
        return max(self.breaker.wait_s(now), self.of_models[served].wait_s(now))

    def begin(self, served: str) -> None:
        self.num_running += 1
        now = self._clock()
        self.breaker.sent(now)
        self.of_models[served].sent(now)

    def end(self) -> None:
        self.num_running -= 1

    def delivered(self, served: str, first_token_s: float) -> None:
        self._answered(served)
        weight = 0.2 if self.first_token_s else 1.0
        self.first_token_s += weight * (first_token_s - self.first_token_s)
        self.attempts["delivered"] += 1

    def cut(self, served: str) -> None:
        self.breaker.undecided()
        self.of_models[served].undecided()
        self.attempts["cut"] += 1

    def failed(self, served: str, fault: Fault) -> None:
        now = self._clock()
        model = self.of_models[served]
        self.attempts[fault.reason] += 1
        match fault.blame:
            case "client":
                self._answered(served)
            case "model" | "no_model":
                self.breaker.succeeded()  # it was reached
                model.failed(now, fault.reason, at_once=fault.blame == "no_model")
                if fault.wait_s > 1:
                    model.told_to_wait(now, fault.wait_s)
            case "rate":
                model.undecided()
                self.breaker.told_to_wait(now, fault.wait_s)
            case "address" | "credential":
                model.undecided()
                self.breaker.failed(now, fault.reason, at_once=fault.blame == "credential")

    def _answered(self, served: str) -> None:
        self.breaker.succeeded()
        self.of_models[served].succeeded()
