"""First come, first served: the same requests in the order of arrival, and in that of fairness."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from engine_driver import LINK, Driver
from fakes import ScriptedRunner, generate_request
from hypothesis import given
from hypothesis import strategies as st
from simulation import PacedRunner, paced_driver

from cache.tree.handle import Probe
from workers.engine.fcfs.policy import EVERYBODY, ArrivalQueue
from workers.engine.queueing.fairness import VirtualCounters
from workers.engine.queueing.sweeping import MAX_STALE
from workers.protocol.messages import Failed

BLOCK = 4


def driver(policy, num_blocks=400, **options):
    runner = ScriptedRunner(num_blocks=num_blocks, block_size=BLOCK)
    return Driver(runner, policy=policy, **options)


def prompt(length, variant=0):
    """Different from the first block on."""
    return [97 + variant, *([98] * (length - 1))]


def running(drive, tier="interactive"):
    return [s.attempt.message.request_id for s in drive.scheduler.running[tier]]


def entered(drive):
    order = []
    while not drive.idle:
        drive.step()
        order += [name for name in running(drive) if name not in order]
    return order


@pytest.mark.parametrize(("policy", "order"), [("fcfs", ["a0", "a1", "a2", "b"]), ("fair", ["a0", "b", "a1", "a2"])])
def test_a_tenant_that_comes_late_waits_for_all_that_came_before(policy, order):
    drive = driver(policy, max_running=1)
    requests = [generate_request(f"a{i}", prompt(30, i), 2, tenant="a") for i in range(3)]
    drive.send(*requests, generate_request("b", prompt(30, 9), 2, tenant="b"))
    assert entered(drive) == order
    drive.check_idle()


@pytest.mark.parametrize(("policy", "order"), [("fcfs", ["cold", "warm"]), ("fair", ["warm", "cold"])])
def test_a_longer_match_does_not_overtake(policy, order):
    drive = driver(policy, max_running=1)
    drive.send(generate_request("first", prompt(40), 2))
    drive.run()
    drive.send(generate_request("cold", prompt(44, 2), 2))
    drive.send(generate_request("warm", [*prompt(40), 7, 7], 2))
    assert entered(drive) == order


@pytest.mark.parametrize(("policy", "num_running"), [("fcfs", 2), ("fair", 1)])
def test_nobody_is_held_back_for_a_prefix_that_another_one_computes(policy, num_running):
    drive = driver(policy)
    drive.send(*[generate_request(name, prompt(60), 2) for name in ("a", "b")])
    drive.step()
    assert len(running(drive)) == num_running
    for request in drive.run().check_idle().requests.values():
        drive.check_alone(request)


@pytest.mark.parametrize(
    ("policy", "tokens"), [("fcfs", [{"a": 20}, {"a": 10, "b": 10}]), ("fair", [{"a": 10, "b": 10}])]
)
def test_a_prompt_is_dealt_all_it_can_use_before_a_later_one(policy, tokens):
    drive = driver(policy, max_batch_tokens=20, max_running=4)
    drive.send(*[generate_request(n, prompt(30, i), 3) for i, n in enumerate("ab")])
    dealt = []
    for _ in tokens:
        before = dict(computed(drive))
        drive.step()
        after = computed(drive)
        dealt.append({n: after[n] - before.get(n, 0) for n in after if after[n] > before.get(n, 0)})
    assert dealt == tokens


def computed(drive):
    return {
        s.attempt.message.request_id: s.num_computed for s in drive.scheduler.running["interactive"] if s.num_computed
    }


def test_interactive_still_comes_before_batch_that_came_earlier():
    drive = driver("fcfs", max_running=1)
    drive.send(generate_request("batch", prompt(20), 2, tenant="a", tier="batch"))
    drive.send(generate_request("chat", prompt(20, 1), 2, tenant="a"))
    drive.step()
    assert (running(drive), running(drive, "batch")) == (["chat"], [])
    drive.run().check_idle()


@pytest.mark.parametrize(("policy", "victim"), [("fcfs", "last"), ("fair", "much")])
def test_the_latest_is_preempted_whoever_got_most(policy, victim):
    drive = driver(policy, num_blocks=64)
    for name, tenant in (("first", "a"), ("much", "b"), ("last", "c")):
        drive.send(generate_request(name, prompt(8, ord(tenant)), 40, tenant=tenant))
    drive.step()
    drive.scheduler.counters.charge("b", output=1000)
    growth = drive.scheduler.growth
    chosen = growth._victim(drive.scheduler.running["interactive"][0])
    assert chosen.attempt.message.request_id == victim
    chosen.num_preempted = 9
    again = growth._victim(drive.scheduler.running["interactive"][0])
    assert (again is chosen) == (policy == "fcfs")


@pytest.mark.parametrize(("policy", "is_refused"), [("fcfs", True), ("fair", False)])
def test_who_would_wait_behind_others_for_too_long_is_told_so(policy, is_refused):
    runner = PacedRunner((0.0, 0.001, 0.0), num_blocks=400, block_size=BLOCK)
    drive = paced_driver(runner, policy=policy, max_batch_tokens=8, max_running=1, ttft_s=1.0)
    drive.send(generate_request("warm", prompt(90), 1, tenant="a"))
    drive.run()
    flood = [generate_request(f"a{i}", prompt(90, i), 1, tenant="a") for i in range(99)]
    drive.send(*flood)
    drive.step()
    drive.send(generate_request("b", prompt(20, 1), 1, tenant="b"))
    drive.step()
    assert isinstance(drive.endings.get((LINK, "b")), Failed) == is_refused


@dataclass(eq=False)
class Queued:
    order: tuple[int, int]
    tokens: list[int]


@given(st.lists(st.tuples(st.sampled_from(["push", "remove", "take"]), st.integers(0, 99))))
def test_the_queue_names_the_earliest_whenever_it_was_pushed(actions):
    """Against a plain model: a dict and `min`."""
    queue = ArrivalQueue(VirtualCounters(), lambda sequence: Probe(3, None), lambda: 8)
    present, seen = {}, set()
    for action, number in actions:
        if action == "push" and number not in seen:  # nobody arrives twice
            seen.add(number)
            sequence = Queued((number, 0), [0] * (number + 3))
            present[number] = sequence
            queue.push(sequence)
        elif action != "push" and present:
            gone = min(present) if action == "take" else sorted(present)[number % len(present)]
            (queue.take if action == "take" else queue.remove)(present.pop(gone))
        assert len(queue) == len(present)
        assert queue.num_uncached == queue.queued[EVERYBODY].num_tokens == sum(present)
        assert queue.queued[EVERYBODY].num_sequences == len(present)
        first = queue.peek(lambda group: True)
        assert first is (present[min(present)] if present else None)


def test_cancelled_sequences_behind_one_that_waits_leave_a_bounded_heap():
    queue = ArrivalQueue(VirtualCounters(), lambda sequence: Probe(3, None), lambda: 8)
    sequences = [Queued((number, 0), [0] * 9) for number in range(3000)]
    for sequence in sequences:
        queue.push(sequence)
    for sequence in sequences[1:]:
        queue.remove(sequence)
    assert queue.peek(lambda group: True) is sequences[0]
    assert len(queue._heap) <= 2 + MAX_STALE
