"""How much of a step a tenant gets while others may come: through the engine, sizes read off what the device ran."""

import pytest
from engine_driver import Driver
from fakes import ScriptedRunner, generate_request

BUDGET = 64


def driver():
    return Driver(
        ScriptedRunner(num_blocks=2000, block_size=4), max_batch_tokens=BUDGET, max_running=8
    )


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
