"""The host tier as the engine uses it: restores, swaps, and what either is worth."""

from __future__ import annotations

import pytest
from engine_driver import LINK, Driver
from fakes import ScriptedRunner, encode, generate_request

from workers.engine.queueing.pace import MIN_STEPS
from workers.engine.values.errors import DeviceOutOfMemory
from workers.protocol.messages import CacheCommand, CacheRange, Cancel

TEXT = encode("abcdefghijklmnopqrstuvwxyz")


def driver(*, num_blocks=20, lag=0, preempt="auto", limits=None, **host):
    host.setdefault("num_slots", 64)
    runner = ScriptedRunner(num_blocks=num_blocks, block_size=4)
    return Driver(runner, lag=lag, host=host, preempt=preempt, **(limits or {}))


def ask(drive, name, prompt=TEXT, max_tokens=4, **fields):
    drive.send(generate_request(name, prompt, max_tokens, **fields))
    drive.run()
    return drive.endings[LINK, name]


def make_hot(drive, **fields):
    for number in range(3):
        ask(drive, f"hot{number}", **fields)


def teach(drive):
    """A prefill of a thousand tokens takes a second."""
    for _ in range(MIN_STEPS):
        drive.scheduler.budget.step_time.add(1000, 0, 1.0)


def flood(drive, rounds=4):
    """Another tenant takes the whole pool."""
    for _ in range(rounds):
        number = len(drive.endings)
        ask(drive, f"flood{number}", encode(f"{number:02}" * 20), tenant="flood")


def alone(drive):
    drive.check_idle()
    for (link, _), request in drive.requests.items():
        drive.check_alone(request, link=link)
    return drive


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("max_delay", [0, 3])
def test_what_was_hit_twice_comes_back_from_the_host_as_cached_tokens(lag, max_delay):
    drive = driver(lag=lag, delay=lambda: max_delay)
    make_hot(drive)
    flood(drive)
    again = ask(drive, "again")
    assert again.usage.cache_read == again.cache.cached_tokens == 24
    assert again.usage.recomputed == 0
    assert again.cache.miss_reason == "below_block"
    assert drive.scheduler.restores.counts.num_restored == 6
    alone(drive)


def test_what_was_hit_once_goes_for_good():
    drive = driver()
    ask(drive, "first")
    ask(drive, "second")
    flood(drive)
    assert ask(drive, "again").usage.cache_read == 0
    assert drive.cache.host.counts.num_written == 0


def test_what_is_worth_much_is_written_at_once():
    drive = driver()
    ask(drive, "first", retention=(CacheRange(0, -1, 70),))
    assert drive.cache.host.counts.num_written == 6
    flood(drive)
    assert ask(drive, "again").usage.cache_read == 24


def test_another_tenant_gets_nothing_of_it_and_the_same_tenant_does():
    drive = driver()
    make_hot(drive, tenant="anna")
    flood(drive)
    assert ask(drive, "bert", tenant="bert").usage.cache_read == 0
    flood(drive)
    assert ask(drive, "anna", tenant="anna").usage.cache_read == 24
    alone(drive)


def test_a_test_step_writes_to_no_block_before_the_host_has_its_copy():
    drive = driver()
    make_hot(drive)
    host, tables = drive.cache.host, drive.scheduler.block_tables
    taken = drive.cache.allocate(drive.cache.num_free + 1, needed_by="tenant")
    host.purge("tenant")
    drive.cache.owners.offers._offered.clear()
    with tables.spare() as spare:
        assert spare is not None and host.counts.num_written > 6
        assert not drive.cache.owners.offers.take(), "it would be copied after the step"
    assert drive.cache.tenants() == ("tenant",), "the step is on nobody's account"
    drive.cache.free(taken)


def test_a_request_that_does_not_read_restores_nothing():
    drive = driver()
    make_hot(drive)
    flood(drive)
    again = ask(drive, "again", cache_read=False)
    assert (again.usage.cache_read, again.cache.miss_reason) == (0, "opt_out")


def test_a_purge_empties_the_host_too():
    drive = driver()
    make_hot(drive)
    flood(drive)
    drive.send(CacheCommand("drop", tenant="tenant"))
    assert ask(drive, "again").usage.cache_read == 0
    assert drive.cache.host.num_of("tenant") == 0
    alone(drive)


def test_a_purge_while_a_restore_is_on_its_way_leaves_nothing_behind():
    drive = driver(delay=lambda: 5)
    make_hot(drive)
    flood(drive)
    drive.send(generate_request("again", TEXT, 4))
    drive.step()
    assert drive.scheduler.restores.num_open == 1
    drive.send(CacheCommand("drop", tenant="tenant"))
    drive.run()
    assert drive.cache.host.num_of("tenant") == 0
    assert ask(drive, "later").usage.cache_read == 0
    alone(drive)


def test_a_copy_that_is_slower_than_a_prefill_is_skipped_and_the_miss_says_so():
    drive = driver(seconds_per_block=60.0)
    make_hot(drive)
    flood(drive)
    teach(drive)
    again = ask(drive, "again")
    assert (again.usage.cache_read, again.cache.miss_reason) == (0, "restore_skipped")
    assert drive.scheduler.restores.counts.num_skipped == 6
    alone(drive)


def test_steps_go_on_while_a_sequence_waits_for_its_restore():
    drive = driver(delay=lambda: 6, num_blocks=40)
    make_hot(drive)
    flood(drive, 8)
    drive.send(generate_request("other", encode("xyz"), 30, tenant="other"))
    drive.step()
    drive.send(generate_request("again", TEXT, 4))
    num_before = len(drive.outputs)
    while drive.scheduler.restores.num_open or len(drive.outputs) == num_before:
        drive.step()
        assert drive.outputs[-1].steps, "a step waited"
    assert len(drive.outputs) - num_before >= 6
    drive.run()
    assert drive.endings[LINK, "again"].usage.cache_read == 24
    alone(drive)


def test_a_sequence_that_ends_while_it_is_restored_leaves_nothing_moving():
    drive = driver(delay=lambda: 50)
    make_hot(drive)
    flood(drive)
    drive.send(generate_request("again", TEXT, 4))
    drive.step()
    assert len(drive.cache.owners.moving) == 6
    drive.send(Cancel("again"))
    drive.run()
    drive.check_idle()
    assert drive.endings[LINK, "again"].usage.cache_read == 0


@pytest.mark.parametrize("when", ["store", "load", "place"])
def test_without_memory_for_a_copy_it_is_computed(when):
    drive = driver(delay=lambda: 2)
    failure = DeviceOutOfMemory("no room")
    if when == "store":
        drive.host.fail = failure
    make_hot(drive)
    flood(drive)
    if when == "load":
        drive.host.fail = failure
    drive.send(generate_request("again", TEXT, 4))
    drive.step()
    if when == "place":
        drive.host.fail = failure
    drive.run()
    if when == "store":
        assert not list(drive.cache.host.copies())
    else:
        assert drive.endings[LINK, "again"].usage.cache_read == 0
    assert drive.scheduler.restores.counts.num_failed == 6
    alone(drive)


def test_copies_that_could_not_be_stored_just_before_are_not_restored():
    """The tree gave the blocks up while their copies waited to be stored, and the slots hold what was in them before."""
    drive = driver()
    ask(drive, "first", max_tokens=1, retention=(CacheRange(0, -1, 70),))
    drive.cache.free(drive.cache.allocate(drive.cache.num_free + drive.cache.num_evictable, needed_by="tenant"))
    assert drive.cache.host.counts.num_written == 6 and not drive.host.num_stored
    drive.host.fail = DeviceOutOfMemory("no room")
    assert ask(drive, "again").usage.cache_read == 0
    assert drive.scheduler.restores.counts.num_failed == 6
    alone(drive)


# --- preemption ---


def crowd(drive, **fields):
    """More than the pool holds: the later ones are preempted on the way."""
    for number in range(5):
        prompt = encode("pqrst"[number] * 15)
        drive.send(generate_request(f"r{number}", prompt, 30, tenant="ABCDE"[number], **fields))
    drive.run(5000)
    assert drive.engine.totals.num_preempted > 0
    return drive.scheduler.restores.counts


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("preempt", ["auto", "recompute", "swap"])
@pytest.mark.parametrize("cache_write", [True, False])
def test_preemption_gives_the_same_tokens_in_each_mode(preempt, cache_write, lag):
    drive = driver(num_blocks=22, lag=lag, preempt=preempt, delay=lambda: 1)
    counts = crowd(drive, cache_write=cache_write)
    assert (counts.num_swapped_out > 0) == (preempt != "recompute")
    if preempt == "swap":
        assert drive.engine.totals.num_recomputed == 0
        assert counts.num_swapped_in > 0
    if preempt == "recompute":
        assert drive.engine.totals.num_recomputed > 0
    alone(drive)


def test_auto_computes_again_where_copies_were_measured_to_be_slower():
    drive = driver(num_blocks=22, seconds_per_block=60.0)
    teach(drive)
    counts = crowd(drive, cache_write=False)
    assert counts.num_swapped_out < 20, "only until the first copy was measured"
    assert drive.engine.totals.num_recomputed > 0
    alone(drive)


def test_swap_swaps_where_copies_were_measured_to_be_slower_too():
    drive = driver(num_blocks=22, preempt="swap", seconds_per_block=60.0)
    teach(drive)
    counts = crowd(drive, cache_write=False)
    assert counts.num_swapped_in == counts.num_swapped_out >= 20
    assert drive.engine.totals.num_recomputed == 0
    alone(drive)


def test_auto_leaves_to_the_tree_what_stays_there():
    """At its lease bound a sequence goes for nobody's sake: its blocks stay evictable, a swap would be for nothing."""
    drive = driver(num_blocks=60, limits={"lease_wait_s": 0.0, "lease_silence_s": 99.0})
    drive.send(generate_request("parked", TEXT, 20, lease_bound=6))
    for _ in range(12):
        drive.step()
    assert drive.endings == {}
    assert drive.scheduler.restores.counts.num_swapped_out == 0


def test_a_swap_that_finds_no_slot_is_refused_and_computed_again():
    drive = driver(num_blocks=22, preempt="swap", num_slots=2)
    counts = crowd(drive)
    assert counts.num_swapped_out == 0
    assert drive.cache.host.counts.num_refused > 0
    alone(drive)


def test_a_preempted_sequence_that_ends_gives_its_slots_back():
    drive = driver(num_blocks=22, preempt="swap")
    for number in range(3):
        drive.send(generate_request(f"r{number}", encode("pqr"[number] * 20), 24))
    while not drive.cache.host._swapped:
        drive.step()
    for number in range(3):
        drive.send(Cancel(f"r{number}"))
    drive.run().check_idle()
    assert drive.cache.host.num_free == 64


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("preempt", ["auto", "recompute", "swap"])
@pytest.mark.parametrize("num_choices", [1, 3])
def test_everybody_preempted_at_every_step_still_gets_the_same_tokens(preempt, lag, num_choices):
    drive = driver(num_blocks=64, lag=lag, preempt=preempt, num_slots=200)
    for number in range(3):
        drive.send(
            generate_request(
                f"r{number}",
                encode("pqr"[number] * 11),
                6,
                num_choices=num_choices,
                temperature=1.0,
                seed=number,
                cache_write=number > 0,
            )
        )
    while not drive.idle:
        drive.step()
        for sequences in drive.scheduler.running.values():
            for sequence in [s for s in sequences if not s.restoring]:
                drive.scheduler.ranks.preempt(sequence, drive.now, "blocks")
    drive.check_idle()
    for request in drive.requests.values():
        for index in range(num_choices):
            drive.check_alone(request, index=index)
    if preempt == "swap":
        assert drive.scheduler.restores.counts.num_swapped_in > 10
