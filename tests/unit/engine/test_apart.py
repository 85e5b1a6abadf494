"""One request that fails its step fails alone: who else was in that step goes on, and gets the tokens it would have got.

Of the class of S1: a number that no check knew of made the step of every tenant fail, and three of those ended the worker.
"""

import pytest
from engine_driver import LINK, Driver
from fakes import VOCAB_SIZE, ScriptedRunner, encode, expected_output, generate_request
from proposing import Informed, speculating

from workers.engine.grammars.grammar import GrammarError
from workers.engine.step.apart import SUSPECT_S, Apart
from workers.engine.values.errors import DeviceOutOfMemory, EngineBroken
from workers.protocol.messages import BeamParams, Cancel, ExtendLease, Finished, SamplingParams

LONG = encode("the quick brown fox jumps over the lazy dog and then sleeps")
VENOM = 255
"""A step with this token among a row's own, or behind one, fails."""
BITTER = SamplingParams(seed=666)
"""A step that draws with these fails."""


class PoisonedRunner(ScriptedRunner):
    """Some requests fail the step that they are in, as ids beyond the vocabulary do on a device."""

    broken = False
    num_failed = 0

    def execute(self, rows):
        venomous = any(VENOM in row.tokens for row in rows)
        bitter = any(draw.params == BITTER for row in rows for draw in row.draws)
        if self.broken or venomous or bitter:
            self.num_failed += 1
            raise RuntimeError("value cannot be converted to type int32 without overflow")
        return super().execute(rows)


@pytest.fixture(params=[0, 1], ids=["at-once", "one-step-late"], autouse=True)
def lag(request, monkeypatch):
    monkeypatch.setattr(Driver, "lag", request.param)
    return request.param


def driver(**options):
    runner = PoisonedRunner(num_blocks=options.pop("num_blocks", 256), block_size=4)
    return Driver(runner, **options)


def model(drive):
    return getattr(drive.runner, "inner", drive.runner)


def venomous(request_id, place, tenant="mallory", **fields):
    prompt = [*LONG[:place], VENOM, *LONG[place:]]
    return generate_request(request_id, prompt, 9, tenant=tenant, **fields)


def bitter(request_id, tenant="mallory", **fields):
    return generate_request(request_id, LONG[:9], 9, tenant=tenant, sampling=BITTER, **fields)


def victims(number, **fields):
    return [
        generate_request(f"v{i}", LONG[i:], 12, tenant=f"tenant {i % 5}", seed=i, temperature=1.0, **fields)
        for i in range(number)
    ]


def codes(drive):
    return {key[1]: getattr(ending, "code", "") for key, ending in drive.endings.items()}


@pytest.mark.parametrize("number", [1, 2, 7, 16])
@pytest.mark.parametrize("poison", [venomous("p", 5), venomous("p", 50), bitter("p")])
def test_only_the_request_that_fails_its_step_fails(number, poison):
    drive = driver(max_batch_tokens=64)
    others = victims(number)
    drive.send(*others[: number // 2], poison, *others[number // 2 :])
    drive.run().check_idle()
    assert {k for k, code in codes(drive).items() if code} == {"p"}
    assert codes(drive)["p"] == "internal"
    for request in others:
        drive.check_alone(request)


def test_s1_requests_without_end_that_fail_their_steps_end_no_engine():
    drive = driver(max_running=8)
    others = victims(4)
    drive.send(*others)
    for i in range(30):
        drive.send(bitter(f"p{i}", tenant="mallory" if i % 2 else "trudy"), venomous(f"q{i}", 20))
        drive.step()
    drive.run().check_idle()
    assert sum(code == "internal" for code in codes(drive).values()) == 60
    for request in others:
        drive.check_alone(request)


def test_a_request_that_comes_and_fails_when_nobody_is_there_ends_no_engine():
    """Three of them in a row did."""
    drive = driver()
    for i in range(9):
        drive.send(bitter(f"p{i}"))
        drive.run().check_idle()
    other = victims(1)[0]
    drive.send(other)
    drive.run().check_idle()
    drive.check_alone(other)


def test_a_device_that_computes_nothing_ends_the_engine_and_nobody_is_told_of_a_failure():
    drive = driver()
    drive.send(*victims(5))
    for _ in range(3):
        drive.step()
    model(drive).broken = True
    with pytest.raises(EngineBroken):
        drive.run()
    assert not drive.endings


def test_many_that_fail_cost_steps_in_proportion_to_them():
    drive = driver(max_running=64, max_batch_tokens=512, num_blocks=2048)
    others = victims(48)
    drive.send(*others)
    for _ in range(6):
        drive.step()
    drive.send(*[bitter(f"p{i}") for i in range(4)])
    drive.run().check_idle()
    # One with everybody, then halves down to the first; the others of its tenant run apart at once.
    assert model(drive).num_failed <= 1 + 6 + 4 * 3
    for request in others:
        drive.check_alone(request)


def test_who_keeps_failing_steps_slows_others_to_half_of_their_pace_and_no_further():
    drive = driver(max_running=16)
    others = victims(4)
    drive.send(*others)
    drive.run()
    alone = len(drive.outputs)
    drive = driver(max_running=16)
    drive.send(bitter("first"))
    drive.run()
    before = len(drive.outputs)
    drive.send(*others)
    num_sent = 0
    while any((LINK, request.request_id) not in drive.endings for request in others):
        drive.send(bitter(f"p{num_sent}"))
        drive.step()
        num_sent += 1
    assert len(drive.outputs) - before <= 2 * alone + 2
    drive.run().check_idle()
    for request in others:
        drive.check_alone(request)


def test_a_tenant_that_was_to_blame_is_served_beside_nobody_for_a_while_and_then_as_before():
    drive = driver()
    drive.send(bitter("p"))
    drive.run()

    def rows_together(run):
        steps = model(drive).steps
        del steps[:]
        both = [generate_request(f"{who} {run}", LONG, 9, tenant=who) for who in ("mallory", "eve")]
        drive.send(*both)
        drive.run()
        for request in both:
            drive.check_alone(request)
        return max(map(len, steps))

    assert rows_together(1) == 1
    drive.now += SUSPECT_S
    assert rows_together(2) == 2


@pytest.mark.parametrize("num_choices", [2, 4])
@pytest.mark.parametrize("tier", ["interactive", "batch"])
def test_choices_and_tiers_beside_a_failing_request_keep_their_tokens(num_choices, tier):
    drive = driver(max_batch_tokens=48, max_running=24)
    others = victims(5, num_choices=num_choices, tier=tier)
    drive.send(*others[:3])
    for _ in range(3):
        drive.step()
    drive.send(bitter("p", num_choices=3), venomous("q", 30, tier=tier), *others[3:])
    drive.run().check_idle()
    assert {k for k, code in codes(drive).items() if code} == {"p", "q"}
    for request in others:
        for index in range(num_choices):
            drive.check_alone(request, index=index)


def test_a_search_beside_a_failing_request_finds_what_it_finds_alone():
    search = generate_request("s", LONG, 9, num_choices=3, lease_bound=99, beams=BeamParams())
    alone = driver()
    alone.send(search)
    alone.run()
    drive = driver()
    drive.send(search, *victims(3))
    drive.step()
    drive.send(bitter("p"))
    drive.run().check_idle()
    for index in range(3):
        assert drive.tokens[LINK, "s", index] == alone.tokens[LINK, "s", index]


def test_guesses_beside_a_failing_request_change_no_token():
    others = [generate_request(f"v{i}", LONG[i:], 20, seed=i) for i in range(4)]
    known = {(r.request_id, 0): expected_output(r.prompt, r.sampling, 20) for r in others}
    drive = driver(speculate=speculating(Informed(known | {("p", 0): []}), max_proposals=4))
    drive.send(*others)
    for _ in range(4):
        drive.step()
    drive.send(bitter("p"))
    drive.run().check_idle()
    for request in others:
        drive.check_alone(request)


def test_leases_cancels_and_preemption_go_on_while_the_one_to_blame_is_looked_for():
    drive = driver(num_blocks=60, max_running=8)
    others = victims(6)
    leased = generate_request("leased", LONG[3:], 12, lease_bound=3)
    drive.send(*others, leased)
    for _ in range(4):
        drive.step()
    for round_ in range(12):
        drive.send(bitter(f"p{round_}"))
        drive.step()
        if round_ == 2:
            drive.send(Cancel("v0"))
        running = drive.scheduler.ranks.running["interactive"]
        if round_ % 3 == 1 and running and not drive.engine.num_in_flight:
            drive.scheduler.ranks.preempt(running[-1], drive.now, "blocks")
    drive.send(ExtendLease("leased", 1, 12))
    drive.run().check_idle()
    assert isinstance(drive.endings[LINK, "leased"], Finished)
    for request in [*others[1:], leased]:
        drive.check_alone(request)


def test_a_copy_that_failed_ends_who_needed_it_and_nobody_else():
    drive = driver()
    forked = generate_request("forked", LONG[:10], 9, num_choices=3, temperature=1.0)
    others = victims(3)
    drive.send(*others, forked)
    drive.runner.copy_blocks = _failing_once(drive.runner.copy_blocks)
    drive.run().check_idle()
    assert {k for k, code in codes(drive).items() if code} == {"forked"}
    for request in others:
        drive.check_alone(request)


def _failing_once(copy_blocks):
    left = [1]

    def copy(pairs):
        if left:
            left.pop()
            raise DeviceOutOfMemory("no room for a copy")
        copy_blocks(pairs)

    return copy


class _Panic(BaseException):
    """As a library in Rust raises it."""


class _Failing:
    """A grammar of everything, whose library fails at some token."""

    num_bytes, vocab_size = 1, VOCAB_SIZE

    def __init__(self, error, at):
        self._error, self._left = error, at

    def start(self):
        return self

    def accept(self, token):
        self._left -= 1
        if self._left == 0:
            raise self._error
        return True

    def mask(self):
        return b"\xff" * 36

    def may_end(self):
        return False


@pytest.mark.parametrize("error", [RuntimeError("of a library"), _Panic("index out of bounds")])
@pytest.mark.parametrize("at", [1, 3])
def test_a_grammar_that_raises_ends_its_own_request_alone(error, at):
    drive = driver(max_batch_tokens=32, max_running=8)
    others = victims(3)
    drive.send(*others, generate_request("g", LONG, 9))
    drive.step()
    drive.attempt("g").use_grammar(_Failing(error, at))
    drive.run().check_idle()
    assert codes(drive)["g"] == "grammar"
    assert len(drive.tokens[LINK, "g", 0]) == at
    for request in others:
        drive.check_alone(request)


def test_choices_whose_grammar_cannot_begin_end_their_own_request_alone(monkeypatch):
    """A grammar that was slow to look at once more, when its prompt was forked, ended the worker."""
    drive = driver(max_batch_tokens=32, max_running=8)
    others = victims(3)
    drive.send(*others, generate_request("g", LONG, 9, num_choices=3, temperature=1.0))
    drive.step()

    def constrain(sequence):
        raise GrammarError("the grammar is too ambiguous to be followed in time")

    monkeypatch.setattr(drive.attempt("g"), "constrain", constrain, raising=False)
    drive.run().check_idle()
    assert codes(drive)["g"] == "grammar"
    for request in others:
        drive.check_alone(request)


def test_a_search_that_raises_ends_alone(monkeypatch):
    drive = driver()
    others = victims(3)
    drive.send(*others)
    drive.send(generate_request("s", LONG, 9, num_choices=3, lease_bound=99, beams=BeamParams()))
    drive.step()

    def advance(*_, **__):
        raise OverflowError("a score")

    search = drive.engine._attempts._beams._searches[drive.attempt("s")]
    monkeypatch.setattr(search, "advance", advance)
    drive.run().check_idle()
    assert codes(drive)["s"] == "internal"
    for request in others:
        drive.check_alone(request)


def test_a_request_that_cannot_be_taken_in_is_refused_alone(monkeypatch):
    drive = driver()
    others = victims(3)
    drive.send(*others)
    drive.step()
    admit = drive.engine._attempts._intake.admit

    def faulty(message, *args):
        if message.request_id == "odd":
            raise OverflowError("int too large to convert to float")
        return admit(message, *args)

    monkeypatch.setattr(drive.engine._attempts._intake, "admit", faulty)
    drive.send(generate_request("odd", LONG, 5))
    drive.run().check_idle()
    assert codes(drive)["odd"] == "internal"
    for request in others:
        drive.check_alone(request)


def test_turns_alternate_between_who_runs_apart_and_all_others():
    apart, attempts = Apart(), [_FakeAttempt(f"t{i}", i) for i in range(4)]
    assert list(apart.turns(0.0, list)) == [None]
    assert apart.failed(attempts, 0.0, alone=False) is None
    taken = []
    for _ in range(3):
        takes = next(apart.turns(0.0, list))
        taken.append([a.serial for a in attempts if takes(_FakeSequence(a))])
    assert taken == [[0, 1], [0, 1], [2, 3]]
    assert list(apart.turns(0.0, list)) == [None]


class _FakeAttempt:
    def __init__(self, tenant, serial):
        self.message = generate_request(tenant=tenant)
        self.serial = serial


class _FakeSequence:
    def __init__(self, attempt):
        self.attempt = attempt
