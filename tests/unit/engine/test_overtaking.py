"""Others are simulated, step by step, while a long sequence waits for its blocks, or one with many choices for places."""

from __future__ import annotations

import pytest
from engine_driver import LINK, Driver
from fakes import ScriptedRunner, generate_request
from simulation import BlindRunner, paced_driver

from workers.engine.scheduling import overtaking
from workers.engine.sequences.sequence import Status

NUM_LONG = 196
SHORT = 8, 4
"""Tokens of prompt and output of a short request."""


class World:
    """One tenant's long sequence was preempted, or never ran. Of 100 blocks another tenant's sequence holds 40 and more, for
    100 steps. Short requests of a third tenant never stop: `num_short` of them wait at any time."""

    def __init__(self, num_short, tier="interactive", ran=True, **options):
        self.drive = Driver(ScriptedRunner(num_blocks=101, block_size=4), max_running=16, **options)
        self.tier, self.num_short = tier, num_short
        self.came, self.waits = {}, []
        self.step_number = 0
        self.send("hog", "hog", 150, 110)
        self.drive.step()
        if not ran:
            self._steps(16)
        self.send("long", "long", NUM_LONG, 30)
        self._steps(1 if not ran else 16)
        (self.long,) = self.drive.attempt("long").sequences
        if ran:
            assert self.long.status is Status.RUNNING
            self.drive.scheduler.ranks.preempt(self.long, self.drive.now, "blocks")
        self.waiting = self.long.status
        assert self.waiting is (Status.PREEMPTED if ran else Status.WAITING)

    def _steps(self, number):
        for _ in range(number):
            self.drive.step()

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


@pytest.mark.parametrize("ran", [True, False])
@pytest.mark.parametrize("tier", ["interactive", "batch"])
@pytest.mark.parametrize("lag", [0, 1])
def test_short_requests_of_others_do_not_wait_for_a_long_sequence_that_waits_for_blocks(tier, lag, ran):
    world = World(2, tier, ran, lag=lag)
    world.run_until(lambda: world.hog_ended)
    assert len(world.waits) > 20
    assert world.longest_wait() <= 12, "they waited for the blocks of a stranger"


@pytest.mark.parametrize("ran", [True, False])
@pytest.mark.parametrize("num_short", [1, 6, 40])
def test_it_runs_as_soon_as_what_ran_before_it_ended_however_many_pass(num_short, ran):
    world = World(num_short, ran=ran)
    world.run_until(lambda: world.hog_ended)
    assert world.long.status is world.waiting, "it did fit"
    ended_at = world.step_number
    world.run_until(lambda: world.long.status is Status.RUNNING)
    assert world.step_number - ended_at <= 2
    assert len(world.waits) >= min(10 * num_short, 30), "nobody passed it"
    world.run_until(lambda: (LINK, "long") in world.drive.endings)
    world.num_short = 0
    world.drive.run().check_idle()
    world.drive.check_alone(world.drive.requests[LINK, "long"])


@pytest.mark.parametrize(("ran", "name"), [(True, "MAX_PASSED"), (False, "MAX_PASSED_NEW")])
def test_after_a_bounded_number_of_tokens_nobody_passes_until_those_that_passed_have_ended(monkeypatch, ran, name):
    monkeypatch.setattr(overtaking, name, 0.25)  # less than what fits beside it
    world, rounds, done = World(40, ran=ran), [], set()
    running = world.drive.scheduler.running["interactive"]

    def is_over():
        now = {s.attempt.message.request_id for s in running if s.attempt.message.tenant == "short"}
        if done and not now:
            rounds.append(len(done))
            done.clear()
        done.update(now)
        return world.hog_ended

    world.run_until(is_over)
    assert len(rounds) > 10, "the count did not begin anew"
    assert set(rounds) == {-(-len(world.long.tokens) // 4 // sum(SHORT))}


def test_an_older_one_that_is_preempted_meanwhile_begins_no_new_count(monkeypatch):
    monkeypatch.setattr(overtaking, "MAX_PASSED", 3)
    world = World(0)
    law = overtaking.Overtaking(world.drive.scheduler.block_tables, 16)
    world.send("own", "long", *SHORT)
    for number in range(200):
        world.send(f"short{number}", "short", *SHORT)
    world.drive.step()
    ((older,), *shorts) = [world.drive.attempt(name).sequences for name in ("own", *(f"short{n}" for n in range(200)))]
    num_passed = 0
    for (short,) in shorts:
        short.attempt.end_reason = "stop"  # those that passed hold nothing: only the number of tokens counts
        if law.allows(short, overtaking.Need(world.long, 0, 0)):
            law.passed(short, [world.long])
            num_passed += 1
        law.allows(short, overtaking.Need(older, 0, 0))  # as if it had become the head for a step
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


class Crowd:
    """Chats, a batch request with many choices, and batch jobs of another tenant, on a worker with 64 places."""

    def __init__(self, num_wide):
        runner = BlindRunner((0.005, 0.00001, 0.0), num_blocks=4000, block_size=16)
        self.drive = paced_driver(runner, max_batch_tokens=256, max_running=64)
        self.drive._check_running = lambda: None
        self.number = 0
        self.run(60, num_chats=35)
        self.send("wide", "wide", 20, num_choices=num_wide, tier="batch")

    def send(self, name, tenant, num_output, **how):
        self.number += 1
        tokens = [self.number % 250, self.number // 250, *[7] * 20]
        self.drive.send(generate_request(name, tokens, num_output, tenant=tenant, **how))

    def run(self, num_steps, num_chats, num_jobs=0):
        """Runs steps with so many chats and jobs. Returns the number of jobs that ended in them."""
        num_before = self._num_ended("job")
        for _ in range(num_steps):
            here = [name[:4] for _, name in self.drive.engine.attempts]
            for _ in range(num_chats - here.count("chat")):
                self.send(f"chat{self.number}", f"a{self.number % 10}", 100 + self.number % 100)
            for _ in range(num_jobs - here.count("jobs")):
                self.send(f"jobs{self.number}", "jobs", 20, tier="batch")
            self.drive.step()
        return self._num_ended("job") - num_before

    def _num_ended(self, kind):
        return sum(name.startswith(kind) for _, name in self.drive.endings)

    @property
    def is_wide_in(self):
        return (LINK, "wide") in self.drive.endings or self.drive.attempt("wide").sequences[0].status is Status.RUNNING


def test_a_batch_request_with_many_choices_does_not_keep_other_tenants_on_the_floor():
    crowd = Crowd(num_wide=32)
    num_jobs = crowd.run(400, num_chats=35, num_jobs=40)
    assert not crowd.is_wide_in
    alone = Crowd(num_wide=1).run(400, num_chats=35, num_jobs=40)
    assert num_jobs > alone / 2, (num_jobs, alone)


def test_batch_that_never_stops_does_not_keep_one_with_many_choices_from_the_places_that_chats_leave_it():
    crowd = Crowd(num_wide=32)
    crowd.run(100, num_chats=35, num_jobs=40)
    crowd.run(200, num_chats=15, num_jobs=40)  # until the last of the other chats ended
    crowd.run(60, num_chats=15, num_jobs=40)
    assert crowd.is_wide_in
