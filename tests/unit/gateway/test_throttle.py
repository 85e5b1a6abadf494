"""Adaptive throttling: what is let through, who is let in again, when it opens. Time is given."""

from __future__ import annotations

import pytest

from gateway.intake.throttle import ACCEPTS, LONGEST_S, OPEN_S, AdaptiveThrottle

WHO = ("tenant", "model")


class Workers:
    """Take so many requests in a second, behind a queue of two seconds, and tell all others to come again later."""

    def __init__(self, rate: float, after_s: float = 8.0) -> None:
        self.throttle = AdaptiveThrottle(seed=1)
        self.rate, self.after_s = rate, after_s
        self.num_asked = self.num_taken = self.num_refused = 0
        self._room = 0.0
        self._at = 0.0

    def send(self, request: bytes, now: float) -> float:
        """Seconds told; 0: taken."""
        if not self.throttle.is_open(*WHO, now):
            after_s = self.throttle.refuse(*WHO, request, now)
            if after_s:
                return after_s
        self.num_asked += 1
        self._room = min(2 * self.rate, self._room + (now - self._at) * self.rate)
        self._at = now
        if self._room >= 1:
            self._room -= 1
            self.num_taken += 1
            return 0.0
        self.num_refused += 1
        self.throttle.refused(*WHO, request, self.after_s, now)
        return self.after_s

    def flood(self, rate: float, seconds: float, since: float = 0.0) -> list[float]:
        return [self.send(str((since, n)).encode(), since + n / rate) for n in range(int(rate * seconds))]


def test_ten_times_what_workers_take_costs_them_twice_what_they_take():
    workers = Workers(rate=30)
    workers.flood(300, 20)
    start = workers.num_asked, workers.num_taken
    told = workers.flood(300, 20, since=20)
    asked, taken = workers.num_asked - start[0], workers.num_taken - start[1]
    assert taken == pytest.approx(600, rel=0.05)
    assert asked == pytest.approx(ACCEPTS * taken, rel=0.15)
    assert all(6 <= seconds <= 10 for seconds in told if seconds)


@pytest.mark.parametrize("times", [0.5, 1.0, 1.5])
def test_below_twice_what_workers_take_only_they_refuse(times: float):
    workers = Workers(rate=30)
    told = workers.flood(30 * times, 30)
    assert sum(map(bool, told)) <= workers.num_refused + 0.01 * len(told)


def test_who_comes_at_the_time_a_worker_told_is_let_through():
    workers = Workers(rate=30)
    workers.flood(300, 10)
    throttle = workers.throttle
    again = [f"again{n}".encode() for n in range(50)]
    for request in again:
        throttle.refused(*WHO, request, 4.0, 10.0)
    assert all(throttle.refuse(*WHO, request, 12.0) == 2.0 for request in again)
    assert all(throttle.refuse(*WHO, request, 14.1) == 0.0 for request in again)
    newcomers = [throttle.refuse(*WHO, f"new{n}".encode(), 14.1) for n in range(50)]
    assert sum(map(bool, newcomers)) > 25


def test_a_tenant_that_calmed_down_is_let_through_at_once():
    workers = Workers(rate=30)
    workers.flood(300, 20)
    assert not workers.throttle.is_open(*WHO, 20.0)
    assert workers.throttle.is_open(*WHO, 20.1 + OPEN_S)
    assert workers.throttle.refuse(*WHO, b"next", 20.1 + OPEN_S) == 0.0


def test_others_and_other_models_are_not_concerned():
    workers = Workers(rate=1)
    workers.flood(300, 5)
    assert workers.throttle.is_open("tenant", "another", 5.0)
    assert workers.throttle.is_open("another", "model", 5.0)


def test_what_is_remembered_is_bounded():
    workers = Workers(rate=1, after_s=1.0)
    throttle = workers.throttle
    for number in range(20_000):
        throttle.refused(*WHO, str(number).encode(), 1.0, number / 100)
    assert len(throttle._refused[WHO].places) <= 100 * (1 + 5) + 2
    for number in range(5_000):
        throttle.refused(*WHO, b"x%d" % number, LONGEST_S + 1, 200 + number / 100)
    assert len(throttle._refused[WHO].places) <= 100 * (1 + 5) + 2
