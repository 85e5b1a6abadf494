"""Others are simulated, step by step, while a long sequence that was preempted waits for its blocks."""

from __future__ import annotations

import pytest
from engine_driver import LINK, Driver
from fakes import ScriptedRunner, generate_request

from workers.engine.scheduling import overtaking
from workers.engine.sequences.sequence import Status

NUM_LONG = 196
SHORT = 8, 4
"""Tokens of prompt and output of a short request."""


class World:
    """One tenant's long sequence was preempted. Of 100 blocks another tenant's sequence holds 40 and more, for 100 steps.
    Short requests of a third tenant never stop: `num_short` of them wait at any time."""

    def __init__(self, num_short, tier="interactive", **options):
        self.drive = Driver(ScriptedRunner(num_blocks=101, block_size=4), max_running=16, **options)
        self.tier, self.num_short = tier, num_short
        self.came, self.waits = {}, []
        self.step_number = 0
        self.send("hog", "hog", 150, 110)
        self.drive.step()
        self.send("long", "long", NUM_LONG, 30)
        for _ in range(16):
            self.drive.step()
        (self.long,) = self.drive.attempt("long").sequences
        assert self.long.status is Status.RUNNING
        self.drive.scheduler.ranks.preempt(self.long, self.drive.now, "blocks")

    def send(self, name, tenant, num_prompt, num_output):
        number = len(self.drive.requests)
        tokens = [number % 250, number // 250, *[7] * (num_prompt - 2)]
        self.drive.send(generate_request(name, tokens, num_output, tenant=tenant, tier=self.tier))

    def step(self):
        while sum(1 for at in self.came.values() if at is not None) < self.num_short:
            name = f"short{len(self.came)}"
            self.came[name] = self.step_number
            self.send(name, "short", *SHORT)
        self.drive.step()
        self.step_number += 1
        for name, at in self.came.items():
            if at is not None and (LINK, name) in self.drive.endings:
                self.waits.append(self.step_number - at)
                self.came[name] = None

    def run_until(self, is_done, most=300):
        for _ in range(most):
            if is_done():
                return
            self.step()
        raise AssertionError("it never came")

    @property
    def hog_ended(self):
        return (LINK, "hog") in self.drive.endings

    def longest_wait(self):
        now = self.step_number
        return max([*self.waits, *(now - at for at in self.came.values() if at is not None)])


@pytest.mark.parametrize("tier", ["interactive", "batch"])
@pytest.mark.parametrize("lag", [0, 1])
def test_short_requests_of_others_do_not_wait_for_a_long_sequence_that_waits_for_blocks(tier, lag):
    world = World(2, tier, lag=lag)
    world.run_until(lambda: world.hog_ended)
    assert len(world.waits) > 20
    assert world.longest_wait() <= 12, "they waited for the blocks of a stranger"


@pytest.mark.parametrize("num_short", [1, 6, 40])
def test_it_runs_as_soon_as_what_ran_before_it_ended_however_many_pass(num_short):
    world = World(num_short)
    world.run_until(lambda: world.hog_ended)
    assert world.long.status is Status.PREEMPTED, "it did fit"
    ended_at = world.step_number
    world.run_until(lambda: world.long.status is Status.RUNNING)
    assert world.step_number - ended_at <= 2
    assert len(world.waits) >= min(10 * num_short, 30), "nobody passed it"
    world.run_until(lambda: (LINK, "long") in world.drive.endings)
    world.num_short = 0
    world.drive.run().check_idle()
    world.drive.check_alone(world.drive.requests[LINK, "long"])


def test_after_a_bounded_number_of_tokens_nobody_passes_any_more(monkeypatch):
    monkeypatch.setattr(overtaking, "MAX_PASSED", 3)
    world = World(40)
    world.run_until(lambda: world.hog_ended)
    num_passed = len(world.waits)
    most = 3 * len(world.long.tokens)
    assert most - sum(SHORT) < num_passed * sum(SHORT) <= most


def test_an_older_one_that_is_preempted_meanwhile_begins_no_new_count(monkeypatch):
    monkeypatch.setattr(overtaking, "MAX_PASSED", 3)
    world = World(0)
    law = overtaking.Overtaking(world.drive.scheduler.block_tables)
    world.send("own", "long", *SHORT)
    for number in range(200):
        world.send(f"short{number}", "short", *SHORT)
    world.drive.step()
    ((older,), *shorts) = [world.drive.attempt(name).sequences for name in ("own", *(f"short{n}" for n in range(200)))]
    num_passed = 0
    for (short,) in shorts:
        short.attempt.end_reason = "stop"  # those that passed hold nothing: only the number of tokens counts
        if law.allows(short, world.long, 0):
            law.passed(short, world.long)
            num_passed += 1
        law.allows(short, older, 0)  # as if it had become the head for a step
    assert 0 < num_passed * sum(SHORT) <= 3 * len(world.long.tokens)


def test_one_that_does_not_fit_beside_it_waits_and_others_pass_both():
    world = World(1)
    world.send("large", "large", 170, 4)
    world.run_until(lambda: world.hog_ended)
    assert not world.drive.tokens[LINK, "large", 0]
    assert len(world.waits) > 10


def test_a_tenant_does_not_pass_its_own_sequence():
    world = World(1)
    world.send("own", "long", *SHORT)
    world.run_until(lambda: world.hog_ended)
    assert not world.drive.tokens[LINK, "own", 0]
    world.run_until(lambda: (LINK, "own") in world.drive.endings)


def test_first_come_first_served_lets_nobody_pass():
    world = World(2, policy="fcfs")
    world.run_until(lambda: world.hog_ended)
    assert len(world.waits) == 0


def test_a_step_looks_at_few_of_many_tenants_that_do_not_fit_either(monkeypatch):
    world, looked = World(0), []
    for number in range(60):
        world.send(f"large{number}", f"tenant {number}", 170, 4)
    allows = overtaking.Overtaking.allows
    monkeypatch.setattr(overtaking.Overtaking, "allows", lambda *told: looked.append(told) or allows(*told))
    world.step()
    assert overtaking.MAX_LOOKED <= len(looked) <= 2 * overtaking.MAX_LOOKED, "preempted ones and those that never ran"
