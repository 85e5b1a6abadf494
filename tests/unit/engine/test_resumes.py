"""Attempts that go on where another worker was lost: their leases, their place among others, and what is measured of
them. That they say the same tokens on a real model is in `tests/integration/worker/test_resumes.py`."""

from __future__ import annotations

import pytest
from engine_driver import LINK, Driver
from fakes import ScriptedRunner, encode, generate_request
from simulation import PacedRunner, paced_driver

from workers.protocol.messages import Cancel, ExtendLease

LONG = encode("the quick brown fox jumps over the lazy dog")
NUM_TOKENS = 20


def answer(num_choices=1, **fields):
    """Returns the tokens of each choice of the attempt that nobody interrupted."""
    drive = Driver()
    drive.send(generate_request("r", LONG, NUM_TOKENS, num_choices=num_choices, temperature=1.0, **fields))
    drive.run()
    return [drive.tokens[LINK, "r", index] for index in range(num_choices)]


def resumed(whole, cut=8, name="r", **fields):
    """Returns the request as it goes on after `cut` tokens of each choice."""
    given = {"attempt": 1, "num_output_spent": cut * len(whole), "temperature": 1.0, "num_choices": len(whole)}
    resume = tuple((index, tuple(tokens[:cut])) for index, tokens in enumerate(whole))
    return generate_request(name, LONG, NUM_TOKENS, **given | {"resume": resume} | fields)


def steps(drive, number, after_s=0.01):
    for _ in range(number):
        drive.step(after_s)


# --- leases ---


@pytest.mark.parametrize("num_choices", [1, 3])
def test_a_resume_whose_lease_is_spent_parks_and_goes_on_when_it_is_extended(num_choices):
    whole = answer(num_choices)
    drive = Driver(max_batch_tokens=16, max_running=8)
    drive.send(resumed(whole, lease_bound=8 * num_choices))
    steps(drive, 30)
    assert not drive.records
    assert [s.num_unscheduled for s in drive.scheduler.all_running] == [1] * num_choices, "the rest is computed"
    drive.send(ExtendLease("r", 1, NUM_TOKENS * num_choices))
    drive.run().check_idle()
    assert [drive.tokens[LINK, "r", index] for index in range(num_choices)] == [one[8:] for one in whole]
    names = [event.name for event in drive.endings[LINK, "r"].timeline]
    assert names.count("parked") == names.count("unparked") == 1


def test_a_parked_resume_loses_its_blocks_and_ends_where_nobody_extends_it():
    whole = answer()
    for extended in (True, False):
        drive = Driver()
        drive.send(resumed(whole, lease_bound=8))
        steps(drive, 3)
        drive.step(2.1)
        assert drive.scheduler.num_running == 0
        if extended:
            drive.send(ExtendLease("r", 1, NUM_TOKENS))
            drive.run().check_idle()
            assert drive.tokens[LINK, "r", 0] == whole[0][8:]
        else:
            drive.step(15)
            assert drive.endings[LINK, "r"].reason == "lease"
            assert drive.endings[LINK, "r"].usage.output == 0


@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("num_left", [0, 1, 2, 5])
def test_the_last_lease_of_a_resume_ends_with_reason_budget_at_exactly_the_bound(num_choices, num_left):
    whole = answer(num_choices)
    for after in (0, 2):
        drive = Driver(max_batch_tokens=16, max_running=8)
        bound = 8 * num_choices + num_left
        drive.send(resumed(whole, lease_bound=bound))
        steps(drive, after)
        drive.send(ExtendLease("r", 1, bound, last=True))
        drive.run().check_idle()
        assert (drive.endings[LINK, "r"].reason, drive.endings[LINK, "r"].usage.output) == ("budget", num_left)
        for index, tokens in enumerate(whole):
            found = drive.tokens[LINK, "r", index]
            assert found == tokens[8 : 8 + len(found)]
            assert drive.finishes[LINK, "r", index] == "budget"


def test_a_choice_of_a_resume_is_cancelled_while_it_waits_for_its_sibling():
    whole = answer(3)
    drive = Driver(max_batch_tokens=16, max_running=8)
    drive.send(resumed(whole))
    drive.step()
    drive.send(Cancel("r", 1))
    drive.run().check_idle()
    assert drive.finishes[LINK, "r", 1] == "cancelled"
    assert [drive.tokens[LINK, "r", index] for index in (0, 1, 2)] == [whole[0][8:], [], whole[2][8:]]


def test_a_choice_without_a_token_goes_on_beside_one_that_has_some():
    whole = answer(2)
    drive = Driver()
    drive.send(resumed(whole, resume=((0, tuple(whole[0][:8])), (1, ())), num_output_spent=8))
    drive.run().check_idle()
    assert [drive.tokens[LINK, "r", index] for index in (0, 1)] == [whole[0][8:], whole[1]]


# --- what is measured ---


def test_the_gap_before_the_first_token_of_a_resume_is_not_measured_here():
    drive = Driver()
    drive.send(resumed(answer(), cut=8))
    drive.run()
    gaps = [gap for output in drive.outputs for gap, number in output.token_gaps.items() for _ in range(number)]
    assert len(gaps) == NUM_TOKENS - 8 - 1
    assert max(gaps) < 0.1


# --- its place among others ---


def slow_driver(**options):
    """A worker that computes a thousand prompt tokens in 2 s and knows its pace."""
    runner = PacedRunner((0.01, 0.002, 0.0), num_blocks=2000, block_size=4)
    drive = paced_driver(runner, max_batch_tokens=64, max_running=8, **options)
    drive.send(generate_request("warm", [1, *[98] * 60], 12))
    drive.run()
    return drive


@pytest.mark.parametrize("cut", [0, 8])
def test_a_request_of_a_lost_worker_is_not_refused_for_its_wait(cut):
    """Also one that had no token yet."""
    whole = answer()
    drive = slow_driver(ttft_s=0.5)
    drive.send(*[generate_request(f"r{i}", [i, *[98] * 60], 4) for i in range(2, 12)])
    drive.send(generate_request("new", [50, *[98] * 60], 4))
    drive.send(resumed(whole, cut, "moved", **({} if cut else {"resume": ()})))
    drive.run().check_idle()
    assert drive.endings[LINK, "new"].code == "overloaded"
    assert drive.tokens[LINK, "moved", 0] == whole[0][cut:]


def admitted(drive):
    """Returns the names of the attempts by the step in which the first of their sequences was admitted."""
    found = {}
    for (_, name), ending in drive.endings.items():
        found[name] = next(event.step for event in ending.timeline if event.name == "matched")
    return found


def test_a_resume_waits_for_its_turn_like_an_arrival():
    whole = answer()
    drive = Driver(max_batch_tokens=64, max_running=2)
    drive.send(*(generate_request(f"before{i}", [i + 1, *[98] * 20], 12, cache_read=False) for i in range(4)))
    drive.send(resumed(whole, name="moved", cache_read=False))
    drive.send(*(generate_request(f"after{i}", [i + 9, *[98] * 20], 12, cache_read=False) for i in range(4)))
    drive.run().check_idle()
    at = admitted(drive)
    assert max(at[f"before{i}"] for i in range(4)) <= at["moved"] <= min(at[f"after{i}"] for i in range(4))
    assert at["before0"] < at["moved"] < at["after3"]
    assert drive.tokens[LINK, "moved", 0] == whole[0][8:]


@pytest.mark.parametrize("tenant", ["tenant", "other"])
def test_others_are_let_in_beside_a_resume_whose_choices_wait_for_each_other(tenant):
    """Choices come back one after the other, so that the next one finds the prompt. A short prompt has its first token
    before the long one is computed, as it has beside a long prompt of one choice."""
    prompt = [(7 * i) % 100 + 3 for i in range(150)]
    steps_until = []
    for num_choices in (1, 4):
        drive = Driver(ScriptedRunner(num_blocks=400, block_size=4), max_batch_tokens=16, max_running=8)
        resume = tuple((index, (97, 98)) for index in range(num_choices))
        more = {"attempt": 1, "resume": resume, "num_output_spent": 2 * num_choices, "num_choices": num_choices}
        drive.send(generate_request("wide", prompt, 6, **more))
        drive.step()
        drive.send(generate_request("short", [5, 6, 7], 4, tenant=tenant))
        drive.run().check_idle()
        steps_until.append(admitted(drive)["short"])
    assert steps_until[1] == steps_until[0]


def long_prompt_in_prefill(output=(), **options):
    """Returns a worker that has computed a step of a long prompt."""
    prompt = [(7 * i) % 100 + 3 for i in range(150)]
    drive = Driver(ScriptedRunner(num_blocks=400, block_size=4), max_batch_tokens=16, max_running=8, **options)
    moved = {"attempt": 1, "resume": ((0, output),), "num_output_spent": len(output)} if output else {}
    drive.send(generate_request("long", prompt, 6, **moved))
    drive.step()
    return drive, prompt


@pytest.mark.parametrize("output", [(), (97, 98)])
def test_others_wait_for_the_prefix_that_a_resume_computes(output):
    drive, prompt = long_prompt_in_prefill(output)
    drive.send(*(generate_request(f"r{i}", [*prompt, i + 3], 4) for i in range(3)))
    drive.run().check_idle()
    assert drive.engine.totals.num_prefill_tokens < len(prompt) + 30


@pytest.mark.parametrize("output", [(), (97, 98)])
def test_the_prompt_of_a_resume_is_part_of_the_forecast(output):
    drive, _ = long_prompt_in_prefill(output)
    assert drive.scheduler._load().num_prefill_tokens == 150 + len(output) - 16


@pytest.mark.parametrize("policy", ["fair", "fcfs"])
def test_a_resume_of_the_batch_tier_goes_on_under_a_load_of_chats(policy):
    whole = answer(2)
    drive = Driver(max_batch_tokens=32, max_running=4, policy=policy)
    drive.send(resumed(whole, name="job", tier="batch"))
    for number in range(150):
        if number % 3 == 0:
            drive.send(generate_request(f"r{number}", [number % 90 + 3, *[98] * 20], 8))
        drive.step()
    drive.run().check_idle()
    assert [drive.tokens[LINK, "job", index] for index in range(2)] == [one[8:] for one in whole]
    usage = drive.endings[LINK, "job"].usage
    assert usage.output == 2 * (NUM_TOKENS - 8)
    assert usage.recomputed >= 2 * 7
