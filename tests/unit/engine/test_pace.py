import random

import pytest

from workers.engine.queueing.pace import LEAST_BUDGET, LEAST_SHORT, MIN_STEPS, STALE_STEPS, StepTime, TokenBudget

A, B, C = 0.008, 30e-6, 20e-9


def took(num_tokens, num_kv_tokens):
    return A + B * num_tokens + C * num_kv_tokens


def fed(steps=200, noise=0.0):
    rng = random.Random(1)
    step_time = StepTime()
    for _ in range(steps):
        n, kv = rng.randint(1, 2000), rng.randint(0, 500_000)
        step_time.add(n, kv, took(n, kv) * rng.uniform(1 - noise, 1 + noise))
    return step_time


def test_the_fit_finds_the_three_terms_of_a_device():
    a, b, c = fed().fit
    assert (a, b, c) == pytest.approx((A, B, C), rel=0.02)


def test_noise_of_a_tenth_moves_the_prediction_little():
    step_time = fed(noise=0.1)
    assert step_time.predict(1000, 200_000) == pytest.approx(took(1000, 200_000), rel=0.05)


def test_the_largest_step_within_a_time_is_foretold():
    num_tokens = fed().tokens_within(0.05, 100_000)
    assert took(num_tokens, 100_000) == pytest.approx(0.05, rel=0.02)


def test_steps_that_are_all_alike_give_no_negative_term():
    step_time = StepTime()
    for number in range(100):
        step_time.add(64, 5000 + 64 * number, 0.02 - number * 1e-5)
    assert min(step_time.fit) >= 0
    assert step_time.predict(64, 11_000) == pytest.approx(0.019, rel=0.1)


def test_nothing_larger_is_tried_than_twice_what_was_seen():
    step_time = StepTime()
    for _ in range(50):
        step_time.add(10, 100, 0.001)
    assert step_time.tokens_within(10.0, 0) <= 20


def test_a_device_that_became_slower_is_noticed():
    step_time, rng = fed(), random.Random(2)
    for _ in range(200):
        n = rng.randint(1, 2000)
        step_time.add(n, 0, 3 * took(n, 0))
    assert step_time.predict(1000, 0) == pytest.approx(3 * took(1000, 0), rel=0.1)


def test_fixed_costs_stay_known_while_all_steps_are_of_one_size():
    """A flood fills every step: nothing in those tells fixed costs from those of tokens."""
    step_time = StepTime()
    for n in range(40):
        step_time.add(1 + n % 3, 300, 0.001)
    rng = random.Random(3)
    for _ in range(2000):
        step_time.add(256, 7000, 0.013 * rng.uniform(0.9, 1.1))
    fixed_s, token_s, _ = step_time.fit
    assert fixed_s < 0.0015
    assert step_time.predict(256, 7000) == pytest.approx(0.013, rel=0.05)
    assert token_s > 0


def test_a_step_that_something_held_up_moves_the_prediction_little():
    step_time = fed()
    before = step_time.predict(1000, 200_000)
    step_time.add(1000, 200_000, 100 * before)
    assert step_time.predict(1000, 200_000) == pytest.approx(before, rel=0.1)


def test_what_was_foretold_to_take_no_time_is_learned_all_the_same():
    step_time = StepTime()
    for n in range(100):
        step_time.add(1, 10_000 * n, max(1e-6, 1e-6 * (n - 20)))
    assert step_time.predict(1, 0) == 0
    for _ in range(100):
        step_time.add(1, 0, 0.01)
    assert step_time.predict(1, 0) > 0.005


def budget_after(steps, *, limit=2048, target_s=0.05):
    budget = TokenBudget(limit, target_s)
    for n in range(steps):
        budget.step_ran(500 + 20 * (n % 60), 0, took(500 + 20 * (n % 60), 0) * 1.5)
    return budget


def test_the_budget_keeps_an_interactive_step_within_its_target():
    budget = budget_after(100)
    num_tokens = budget.pace(0, hurried=True)
    assert took(num_tokens, 0) * 1.5 == pytest.approx(0.05, rel=0.03)
    assert budget.pace(0, hurried=False) == 2048, "batch alone has no target"


def test_the_budget_never_falls_below_what_is_worth_a_step():
    assert budget_after(100, target_s=0.001).pace(0, hurried=True) == LEAST_BUDGET
    assert budget_after(100, limit=64, target_s=0.001).pace(0, hurried=True) == 64


def test_a_few_steps_foretell_nothing():
    assert budget_after(MIN_STEPS - 1).pace(0, hurried=True) == 2048


def test_a_step_kept_short_is_as_short_as_fixed_costs_allow():
    """Three tokens' time in four at least, half the budget at most."""
    slow, fast = TokenBudget(512, 10.0), TokenBudget(2048, 10.0)
    for n in range(100):
        num_tokens = 100 + 7 * (n % 50)
        slow.step_ran(num_tokens, 0, 0.004 + 130e-6 * num_tokens)
        fast.step_ran(num_tokens, 0, 0.008 + 30e-6 * num_tokens)
    assert slow.num_short == pytest.approx(3 * 0.004 / 130e-6, rel=0.05)
    assert fast.num_short == pytest.approx(3 * 0.008 / 30e-6, rel=0.05)
    cheap = TokenBudget(512, 10.0)
    for n in range(100):
        cheap.step_ran(100 + n, 0, 130e-6 * (100 + n))
    assert cheap.num_short == LEAST_SHORT
    assert budget_after(MIN_STEPS - 1).num_short == 1024


@pytest.mark.parametrize("seed", range(4))
def test_steps_that_are_all_large_and_noisy_do_not_make_a_short_step_long(seed: int) -> None:
    """After small steps there are large ones alone, as at the start of a flood. Noise in them looks like fixed costs."""
    rng = random.Random(seed)
    budget = TokenBudget(2048, 0.05)
    for _ in range(200):
        budget.step_ran(256, 256, 0.008 * rng.uniform(0.95, 1.1))
        for position in range(30):
            budget.step_ran(1, 256 + position, 0.0015 * rng.uniform(0.95, 1.1))
        budget.step_time.rest()
    short = []
    for _ in range(300):
        num_tokens, num_kv_tokens = rng.randint(600, 760), rng.randint(20_000, 28_000)
        seconds = 0.0015 + 40e-6 * num_tokens + 1e-7 * num_kv_tokens
        budget.step_ran(num_tokens, num_kv_tokens, seconds * rng.uniform(0.8, 1.3))
        short.append(budget.num_short)
    assert sorted(short[MIN_STEPS:])[280] < 2 * 3 * 0.0015 / 40e-6


# --- what is out of date ---


def after_load(rest):
    """Streams by the hundred made steps of every size slow; then some steps of today."""
    step_time = StepTime()
    for size in (1, 30, 100, 200, 300, 600):
        for _ in range(50):
            step_time.add(size, 0, 0.05 + 0.004 * size)
    if rest:
        step_time.rest()
    for _ in range(MIN_STEPS):
        step_time.add(1, 0, took(1, 0))
        step_time.add(256, 0, took(256, 0))
    return step_time


def test_a_few_steps_behind_a_rest_outweigh_what_was_seen_before():
    assert after_load(rest=False).predict(256, 0) > 20 * took(256, 0)
    assert after_load(rest=True).predict(256, 0) == pytest.approx(took(256, 0), rel=0.8)


def test_a_rest_by_itself_changes_no_prediction():
    step_time = fed()
    before = step_time.predict(1000, 200_000)
    step_time.rest()
    assert step_time.predict(1000, 200_000) == pytest.approx(before, rel=0.02)
    assert not step_time.has_seen(1000), "and none of them is a step of late"


def test_sizes_that_do_not_occur_any_more_are_outweighed_without_a_rest():
    """One stream is always there: steps of other sizes come from a load that has long ended."""
    step_time = after_load(rest=False)
    for _ in range(2 * STALE_STEPS):
        step_time.add(1, 0, took(1, 0))
    assert not step_time.has_seen(256)
    for _ in range(MIN_STEPS):
        step_time.add(256, 0, took(256, 0))
    assert step_time.predict(256, 0) == pytest.approx(took(256, 0), rel=0.8)
    assert step_time.has_seen(256)
