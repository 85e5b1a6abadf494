"""Order inside a tenant, and prompts that wait for one another."""

from itertools import pairwise

import pytest
from engine_driver import LINK, Driver
from fakes import ScriptedRunner, generate_request

from workers.engine.queueing.deferral import MAX_STEPS
from workers.engine.queueing.sweeping import MAX_STALE
from workers.protocol.messages import Cancel, Region

BLOCK = 4
PUBLIC = Region(b"public".ljust(16, b"\0"))


def driver(num_blocks=400, **options):
    return Driver(ScriptedRunner(num_blocks=num_blocks, block_size=BLOCK), **options)


def prompt(length, variant=0):
    """Different from the first block on."""
    return [97 + variant, *([98] * (length - 1))]


def running(drive):
    return [s.attempt.message.request_id for s in drive.scheduler.running["interactive"]]


def entered(drive):
    order = []
    while drive.inbox or drive.engine.attempts:
        drive.step()
        order += [name for name in running(drive) if name not in order]
    return order


def fresh_tokens(drive):
    """Tokens of prompts that the device computed, over all requests."""
    return drive.engine.totals.num_prefill_tokens


def test_fifty_equal_cold_prompts_of_a_tenant_compute_their_prefix_once():
    drive = driver(max_batch_tokens=64)
    shared = prompt(160)
    drive.send(*[generate_request(f"r{i}", [*shared, 99, i, i, i], 2, seed=i) for i in range(50)])
    drive.run().check_idle()
    assert fresh_tokens(drive) == 160 + 50 * 4
    for (_, name), request in drive.requests.items():
        drive.check_alone(request)
        assert drive.endings[LINK, name].usage.recomputed == 0


def test_equal_prompts_of_two_tenants_do_not_wait_for_each_other():
    drive = driver()
    drive.send(*[generate_request(t, prompt(60), 2, tenant=t) for t in ("a", "b")])
    drive.step()
    assert running(drive) == ["a", "b"]
    drive.run().check_idle()
    assert [e.usage.cache_read for e in drive.endings.values()] == [0, 0]


def test_equal_prompts_of_one_tenant_do():
    drive = driver()
    drive.send(*[generate_request(name, prompt(60), 2) for name in ("a", "b")])
    drive.step()
    assert running(drive) == ["a"]
    drive.run().check_idle()
    assert drive.endings[LINK, "b"].usage.cache_read == 56


def test_a_prompt_waits_for_the_fill_of_its_public_part():
    drive = driver()
    shared = prompt(40)
    drive.send(generate_request("fill", shared, 0, tenant="operator", namespace=(PUBLIC,), pinned=True))
    mine = (Region(PUBLIC.id, 40), Region(b"mine".ljust(16, b"\0")))
    drive.send(generate_request("chat", [*shared, 1, 2, 3], 3, tenant="t", namespace=mine))
    drive.step()
    assert running(drive) == []  # the fill came and went, the chat waited for it
    drive.run().check_idle()
    assert drive.endings[LINK, "chat"].cache.public_tokens == 40


def test_nobody_waits_for_a_leader_that_makes_no_progress_for_longer_than_eight_steps():
    drive = driver()
    drive.send(generate_request("lead", prompt(60), 40))
    drive.step()
    leader = drive.attempt("lead").sequences[0]
    drive.scheduler.deferral.leader = lambda sequence, num_cached, key: leader
    drive.send(generate_request("late", prompt(60, 1), 4))
    steps = 0
    while "late" not in running(drive):
        drive.step()
        steps += 1
    assert steps == MAX_STEPS + 1


def test_a_cancelled_leader_is_followed_by_the_next():
    drive = driver(max_batch_tokens=64)
    drive.send(*[generate_request(f"r{i}", prompt(200), 3) for i in range(3)])
    drive.step()
    drive.send(Cancel("r0"))
    drive.step()
    assert running(drive) == ["r1"]
    drive.run().check_idle()
    assert drive.endings[LINK, "r2"].usage.cache_read == 196


def test_inside_a_tenant_the_longest_match_goes_first():
    drive = driver(max_running=1)
    drive.send(generate_request("warm", prompt(40), 2))
    drive.run()
    drive.send(generate_request("busy", prompt(8, 1), 9))
    drive.step()
    drive.send(
        generate_request("cold", prompt(44, 2), 2),
        generate_request("half", [*prompt(40)[:20], 7, *prompt(20)], 2),
        generate_request("whole", [*prompt(40), 7, 7], 2),
    )
    assert entered(drive) == ["busy", "whole", "half", "cold"]


def test_a_match_that_was_evicted_meanwhile_is_not_believed():
    drive = driver(max_running=1)
    drive.send(generate_request("warm", prompt(40), 2))
    drive.run()
    drive.send(generate_request("busy", prompt(8, 1), 9))
    drive.step()
    drive.send(generate_request("first", prompt(44, 2), 2), generate_request("gone", [*prompt(40), 7], 2))
    drive.step()
    drive.cache.drop(b"tenant".ljust(16, b"\0"))
    assert entered(drive) == ["busy", "first", "gone"]


def test_a_cold_prompt_is_overtaken_by_warm_ones_for_a_while_and_not_for_ever():
    drive = driver(max_running=1, max_batch_tokens=8)
    drive.send(generate_request("warm", prompt(40), 1))
    drive.run()
    drive.send(generate_request("cold", prompt(30, 1), 1))
    drive.send(generate_request("w0", [*prompt(40), 0, 0], 1))
    order, number = [], 0
    while "cold" not in order:
        number += 1
        drive.send(generate_request(f"w{number}", [*prompt(40), number, number], 1))
        output = drive.step()
        order += [a.message.request_id for a in output.ended]
        assert number < 100, "starved"
    assert len(order) > 3, "the match counted for nothing"


def test_a_tenant_is_served_a_quantum_and_then_another_is_chosen():
    """But for who has not been served at all, b at first."""
    drive = driver(max_running=1, max_batch_tokens=10)  # a quantum of 40 tokens
    for name in "ab":
        drive.send(*[generate_request(f"{name}{i}", prompt(15, 3 * i + ord(name)), 1, tenant=name) for i in range(6)])
    order = "".join(name[0] for name in ended(drive))
    assert order == "abbbaaabbbaa"


def test_who_asks_seldom_does_not_wait_for_a_quantum():
    """Also where it has been given something just now, and its counter is a little above the other's."""
    drive = driver(max_running=1, max_batch_tokens=10)  # a quantum of 40 tokens
    drive.send(*[generate_request(f"a{i}", prompt(15, i), 1, tenant="a") for i in range(8)])
    order = []
    for number in range(3):
        drive.send(generate_request(f"b{number}", prompt(15, 90 + number), 1, tenant="b"))
        while f"b{number}" not in order:
            order += [a.message.request_id for a in drive.step().ended]
    order += ended(drive)
    places = [order.index(f"b{number}") for number in range(3)]
    assert max(places[0], *(b - a for a, b in pairwise(places))) <= 2


@pytest.mark.parametrize("length", [6, 60], ids=["each its own group", "one group"])
def test_cancelled_sequences_behind_one_that_waits_leave_bounded_heaps(length):
    """The one that waits came first, so it stays on top of each heap and nothing below it is popped."""
    drive = driver(max_running=1)
    drive.send(generate_request("busy", prompt(60, 1), 200))
    drive.step()
    drive.send(generate_request("stays", prompt(60), 1))
    for turn in range(20):
        names = [f"r{turn}-{i}" for i in range(100)]
        prompts = [[turn, i, *prompt(length)] if length < 60 else [*prompt(length), turn, i] for i in range(100)]
        drive.send(*[generate_request(name, tokens, 1) for name, tokens in zip(names, prompts, strict=True)])
        drive.step()
        drive.send(*[Cancel(name) for name in names])
        drive.step()
    (tenant,) = drive.scheduler.ranks.waiting["interactive"]._tenants.values()
    (group,) = set(tenant._group_of.values())
    assert len(tenant) == 1
    assert max(map(len, (tenant._due, tenant._heap, group.order))) <= 2 + MAX_STALE
    drive.send(Cancel("busy"))
    assert ended(drive) == ["busy", "stays"]


def test_tenants_that_ask_one_request_after_the_other_leave_bounded_heaps():
    """Nobody else waits, so the order of newcomers is never asked for and nothing is popped."""
    drive = driver()
    for number in range(500):
        drive.send(generate_request(f"r{number}", prompt(6, number % 5), 1, tenant=f"t{number % 5}"))
        drive.run()
    queue = drive.scheduler.ranks.waiting["interactive"]
    assert max(len(queue._order._heap), len(queue._newcomers._heap)) <= MAX_STALE


def ended(drive):
    names = []
    while drive.inbox or drive.engine.attempts:
        names += [a.message.request_id for a in drive.step().ended]
    return names
