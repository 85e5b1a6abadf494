"""A step has as many threads as it is quickest with, also while other programs have the cores."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from workers.engine.device.thread_count import ThreadCount

Took = Callable[[int], float]


def drive(count: ThreadCount, start: float, seconds: float, took: Took, num_tokens: int = 1) -> dict[int, float]:
    """Runs steps for so long. Returns the share of the time that each number of threads had."""
    now, shares = start, Counter[int]()
    while now < start + seconds:
        threads = count.of(num_tokens)
        step = took(threads)
        now += step
        count.add(num_tokens, threads, step, now)
        shares[threads] += step
    return {threads: shares[threads] / sum(shares.values()) for threads in shares}


def alone(seconds: float, rng: random.Random) -> Took:
    return lambda threads: seconds / threads * rng.uniform(0.9, 1.2)


def beside_others(seconds: float, rng: random.Random) -> Took:
    """A thread that loses its core comes back some milliseconds later, and the other one waits for it."""

    def took(threads: int) -> float:
        lost = rng.uniform(0.003, 0.02) if rng.random() < (0.5 if threads > 1 else 0.1) else 0.0
        return seconds / threads * rng.uniform(0.9, 1.2) + lost

    return took


@pytest.mark.parametrize("seconds", [0.003, 0.05, 2.0])
def test_alone_a_large_step_keeps_all_threads_and_trials_take_little(seconds: float) -> None:
    shares = drive(ThreadCount(2), 0.0, 200 * max(1.0, seconds), alone(seconds, random.Random(1)))
    assert shares[2] > 0.95


def test_a_step_that_gains_nothing_by_more_threads_has_one() -> None:
    rng = random.Random(2)
    shares = drive(ThreadCount(2), 0.0, 60.0, lambda threads: 0.001 * threads**0.2 * rng.uniform(0.9, 1.2))
    assert shares[1] > 0.9


def test_beside_other_programs_a_step_has_one_thread_and_two_soon_after() -> None:
    rng = random.Random(3)
    count = ThreadCount(2)
    drive(count, 0.0, 30.0, alone(0.003, rng))
    assert drive(count, 30.0, 30.0, beside_others(0.003, rng))[1] > 0.9
    drive(count, 60.0, 20.0, alone(0.003, rng))
    assert drive(count, 80.0, 20.0, alone(0.003, rng))[2] > 0.95


def test_of_eight_threads_those_remain_that_have_a_core() -> None:
    rng = random.Random(4)
    count = ThreadCount(8)
    assert drive(count, 0.0, 30.0, alone(0.05, rng))[8] > 0.9
    shares = drive(count, 30.0, 60.0, lambda n: (0.05 / min(n, 4) + (0.02 if n > 4 else 0.0)) * rng.uniform(0.9, 1.2))
    assert shares[4] > 0.9


def test_small_and_large_steps_have_numbers_of_their_own() -> None:
    rng = random.Random(5)
    count = ThreadCount(2)
    drive(count, 0.0, 20.0, lambda threads: 0.001 * threads * rng.uniform(0.9, 1.2), num_tokens=1)
    drive(count, 20.0, 20.0, alone(0.03, rng), num_tokens=300)
    assert (count.of(1), count.of(300)) == (1, 2)
