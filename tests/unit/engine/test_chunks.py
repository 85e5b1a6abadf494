"""How much of a step a tenant gets while others may come: through the engine, sizes read off what the device ran."""

import pytest
from engine_driver import Driver
from fakes import ScriptedRunner, generate_request
from simulation import BlindRunner, paced_driver

from workers.engine.scheduling.step_plan import StepPlan

BUDGET = 64


def driver():
    return Driver(ScriptedRunner(num_blocks=2000, block_size=4), max_batch_tokens=BUDGET, max_running=8)


def prompt(length, variant):
    return [97 + variant, *([98] * (length - 1))]


def send(drive, name, tenant, length, variant, tier="interactive"):
    request = generate_request(name, prompt(length, variant), 1, tenant=tenant, tier=tier)
    drive.send(request)


def num_tokens(drive):
    return sum(len(row.tokens) for row in drive.runner.steps[-1])


def flooded(drive, tier="interactive"):
    send(drive, "flood", "flood", 1000, 1, tier)
    for _ in range(4):
        drive.step()
    return drive


def test_a_flood_alone_has_the_whole_step():
    assert num_tokens(flooded(driver())) == BUDGET


def test_a_flood_has_half_of_a_step_into_which_somebody_who_asks_seldom_may_come():
    drive = driver()
    send(drive, "rare", "rare", 8, 2)
    drive.run()
    assert num_tokens(flooded(drive)) == BUDGET // 2


def test_who_was_not_served_for_long_is_not_waited_for():
    drive = driver()
    send(drive, "rare", "rare", 8, 2)
    drive.run()
    drive.now += 11
    assert num_tokens(flooded(drive)) == BUDGET


def test_equals_do_not_make_each_others_steps_short():
    drive = driver()
    for name in ("one", "other"):
        send(drive, name, name, 400, len(name))
    for _ in range(6):
        drive.step()
    assert num_tokens(drive) == BUDGET


@pytest.mark.parametrize(("before", "expected"), [("batch", BUDGET), ("interactive", BUDGET // 2)])
def test_batch_has_half_of_a_step_into_which_an_interactive_request_may_come(before, expected):
    drive = driver()
    send(drive, "first", "rare", 8, 2, tier=before)
    drive.run()
    assert num_tokens(flooded(drive, "batch")) == expected


def stream(drive, name, length, variant, num_output):
    drive.send(generate_request(name, prompt(length, variant), num_output, tenant="flood"))
    drive.step()


@pytest.mark.parametrize(("length", "expected"), [(8, BUDGET // 2), (40, 40), (60, 60)])
def test_a_step_that_somebody_waits_for_is_filled_up_to_a_short_one(length, expected):
    drive = driver()
    send(drive, "rare", "rare", 8, 2)
    drive.run()
    flooded(drive)
    for _ in range(18):
        drive.step()
    send(drive, "again", "rare", length, 3)
    while not any(row.tokens[0] == 97 + 3 for row in drive.runner.steps[-1]):
        drive.step()
    assert num_tokens(drive) == expected


@pytest.mark.parametrize(("num_streams", "expected"), [(0, 32), (4, 32), (7, 32)])
def test_streams_count_among_the_tokens_of_a_short_step(num_streams, expected):
    drive = driver()
    send(drive, "rare", "rare", 8, 2)
    drive.run()
    for number in range(num_streams):
        stream(drive, f"stream{number}", 4, 10 + number, 100)
    assert num_tokens(flooded(drive)) == expected


def test_streams_that_fill_a_short_step_leave_a_part_of_one_to_prompts():
    drive = Driver(ScriptedRunner(num_blocks=2000, block_size=4), max_batch_tokens=BUDGET, max_running=60)
    send(drive, "rare", "rare", 8, 2)
    drive.run()
    for number in range(40):
        stream(drive, f"stream{number}", 4, 10 + number, 400)
    assert num_tokens(flooded(drive)) == 40 + BUDGET // 2 // 4


@pytest.mark.parametrize("part", [0.0, 0.1, 0.12, 0.3])
def test_a_small_rest_of_a_prompt_is_not_left_for_a_step_of_its_own(part):
    """Where the pace makes steps shorter than memory would, not where memory does."""
    runner, sizes = BlindRunner((0.008, 1e-4, 0.0), num_blocks=2000, block_size=4), []
    drive = paced_driver(runner, max_batch_tokens=1024, max_running=8)
    stream(drive, "teaches", 1500, 1, 20)
    drive.run()
    drive.now += 60
    paced = drive.scheduler.budget.pace(0, hurried=True)
    assert 300 < paced < 600
    elapse, runner.elapse = runner.elapse, lambda seconds: (sizes.append(seconds), elapse(seconds))
    send(drive, "asks", "one", int(paced * (1 + part)), 2)
    drive.run()
    whole, rest = int(paced * (1 + part)), int(paced * (1 + part)) - paced
    expected = [whole] if rest <= paced // 8 else [paced, rest]
    assert [round((seconds - 0.008) / 1e-4) for seconds in sizes] == expected


@pytest.mark.parametrize(
    ("slack", "share", "left", "taken", "left_over"),
    [
        (100, 40, 30, 30, 100),
        (100, 40, 40, 40, 100),
        (100, 40, 45, 45, 95),
        (100, 40, 46, 40, 100),
        (4, 40, 45, 40, 4),
        (0, 40, 41, 40, 0),
    ],
)
def test_a_step_goes_beyond_its_budget_for_small_rests_only(slack, share, left, taken, left_over):
    plan = StepPlan(0, 0.0, 64, slack)
    assert plan.stretch(share, left) == taken
    assert (plan.slack, plan.budget) == (left_over, 64 + max(0, taken - share))
