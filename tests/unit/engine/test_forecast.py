"""How long whoever comes would wait, against what a device of known pace then does."""

from __future__ import annotations

import pytest
from engine_driver import LINK
from fakes import generate_request
from simulation import PacedRunner, paced_driver

from workers.engine.queueing.forecast import FLOOR_RATE, Forecast, Load, Queued
from workers.engine.queueing.pace import MIN_STEPS, TokenBudget

FIXED_S, TOKEN_S = 0.004, 0.0002
IDLE = Load(num_places=64)


def forecast(*sizes: int, limit: int = 512, each: int = MIN_STEPS) -> Forecast:
    """By somebody who saw steps of these sizes, and had set out to have steps of 0.1 s at most."""
    budget = TokenBudget(limit, 0.1064)
    for size in sizes * each:
        budget.step_ran(size, 0, FIXED_S + TOKEN_S * size)
    return Forecast(budget)


def test_nothing_is_foretold_from_nothing():
    assert Forecast(TokenBudget(512, 0.05)).wait_s(Queued(10**9, 10**6), IDLE) == 0
    assert Forecast(TokenBudget(512, 0.05)).per_second == 0


def test_nobody_waits_where_nobody_stands_before():
    assert forecast(1, 512).wait_s(Queued(), IDLE) == 0


def test_prompts_take_so_many_full_steps():
    found = forecast(1, 512)
    ten_steps = 10 * (FIXED_S + 512 * TOKEN_S)
    assert found.wait_s(Queued(5120, 0), IDLE) == pytest.approx(ten_steps, rel=0.02)
    assert found.per_second == pytest.approx(5120 / ten_steps, rel=0.02)


def test_a_prompt_that_is_being_computed_stands_before_too():
    found = forecast(1, 512)
    begun = Load(num_running=1, num_prefill_tokens=5120, num_places=64)
    assert found.wait_s(Queued(), begun) == pytest.approx(found.wait_s(Queued(5120, 1), IDLE), rel=0.02)


def test_small_steps_say_nothing_about_the_speed_of_large_ones():
    """A step of one token that was held up once a while: a guess from that is not held against anybody."""
    budget = TokenBudget(512, 0.05)
    for number in range(40):
        budget.step_ran(12, 0, 0.3 if number % 7 == 0 else FIXED_S)
        budget.step_ran(1, 0, FIXED_S)
    assert Forecast(budget).wait_s(Queued(12_000, 8), IDLE) < 2 * 12_000 / FLOOR_RATE


def test_with_places_left_it_does_not_count_what_will_be_answered():
    found = forecast(1, 512)
    found.answered(10_000)
    assert found.wait_s(Queued(24 * 12, 24), IDLE) < 2 * (FIXED_S + 512 * TOKEN_S)


def test_without_a_place_answers_have_to_end_first():
    found = forecast(1, 64, 512)
    found.answered(100)
    full = Load(num_running=64, num_places=64)
    # Of 64 answers of a hundred tokens one ends every 100 / 64 steps; 31 before this one, and its own place.
    assert found.wait_s(Queued(31, 31), full) == pytest.approx(32 * 100 / 64 * (FIXED_S + 64 * TOKEN_S), rel=0.05)


def test_answers_are_as_long_as_they_were_of_late():
    found = forecast(1, 512)
    full = Load(num_running=64, num_places=64)
    found.answered(10)
    short = found.wait_s(Queued(100, 100), full)
    for _ in range(200):
        found.answered(1000)
    assert found.wait_s(Queued(100, 100), full) > 50 * short


def test_more_before_somebody_is_never_a_shorter_wait():
    found = forecast(1, 64, 512)
    found.answered(50)
    for load in (IDLE, Load(60, 500, 64, 10_000)):
        waits = [found.wait_s(Queued(n * 100, n), load) for n in range(0, 1000, 10)]
        assert waits == sorted(waits)


@pytest.mark.parametrize(
    ("max_running", "num_blocks", "num_tokens", "num_output"),
    [(8, 1000, 200, 4), (8, 1000, 30, 40), (64, 1000, 200, 4), (64, 1000, 30, 40), (64, 90, 200, 4)],
)
def test_what_is_foretold_comes_about(max_running, num_blocks, num_tokens, num_output):
    """A hundred requests of one tenant at once: when the last of them gets its first token. Steps, places or blocks are
    what there is too little of; blocks that answers will grow into are not foreseen."""
    runner = PacedRunner((FIXED_S, TOKEN_S, 0.0), num_blocks=num_blocks, block_size=16)
    drive = paced_driver(runner, max_batch_tokens=256, max_running=max_running)

    def send(name: str, number: int) -> None:
        for i in range(number):
            drive.send(generate_request(f"{name}{i}", [i, *[98] * (num_tokens - 1)], num_output, seed=i))

    def run() -> None:
        while not drive.idle:
            drive.step(0.0)

    send("before", 40)
    run()
    send("measured", 100)
    drive.step(0.0)
    foretold = drive.scheduler.wait_s()
    run()
    first_us = max(
        event.offset_us
        for i in range(100)
        for event in drive.endings[LINK, f"measured{i}"].timeline
        if event.name == "first_token"
    )
    assert foretold / 2 < first_us / 1e6 < 2 * foretold
