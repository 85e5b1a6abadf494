"""Whole histories in the order of arrival: what `simulation.watch_arrivals` says of each step, and the tokens of fairness.

`HEADGATE_SIMULATION_SEED=n` replays a single one.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
import simulation
from simulation import CHUNK, Trace, name_of, play_all, seeds

from workers.protocol.messages import Finished

pytestmark = pytest.mark.rest


@pytest.mark.parametrize("chosen", seeds(0, 300, CHUNK), ids=name_of)
def test_of_a_tier_nobody_is_served_before_or_preempted_for_one_that_came_later(chosen):
    counts = play_all(chosen, "fcfs")
    for name in ("num_preempted", "num_handed_over", "num_swapped_out"):
        assert counts[name] or len(chosen) == 1, f"never happened: {name}"


@pytest.mark.parametrize("chosen", seeds(0, 200, CHUNK), ids=name_of)
def test_where_everybody_wants_blocks_the_latest_loses_its_own(chosen):
    num_preempted = 0
    for seed in chosen:
        trace = crowded(seed, "fcfs")
        trace.play()
        trace.check()
        num_preempted += trace.tiers["num_preempted"]
    assert num_preempted > 2 * len(chosen) or len(chosen) == 1


def test_fairness_breaks_that_order_in_these_histories():
    """So what is looked at does happen."""
    broken = Counter()
    for seed in range(100):
        trace = crowded(seed, "fair")
        simulation.watch_arrivals(trace.drive.engine, broken)
        trace.play()
        trace.check()
    for law in ("an earlier one waits", "a later one keeps its blocks", "a chunk before an earlier one's"):
        assert broken[law] > 10, (law, broken)


def crowded(seed, policy):
    """Streams of three tenants that together outgrow a small pool."""
    rng = random.Random(seed)
    shape = {
        "num_blocks": rng.randint(20, 28),
        "max_batch_tokens": rng.randint(8, 24),
        "max_running": 5,
        "eos_every": rng.choice([0, 13]),
        "lag": rng.choice([0, 1]),
        "device": {},
        "policy": policy,
    }
    arrivals = [
        {
            "after": rng.randint(0, 3),
            "tenant": rng.choice("ABC"),
            "tier": rng.choice(["interactive", "interactive", "interactive", "batch"]),
            "length": rng.randint(4, 14),
            "variant": rng.randint(0, 2),
            "max_tokens": rng.randint(12, 30),
            "num_choices": rng.choice([1, 1, 1, 2]),
            "cache_write": rng.random() < 0.7,
            "link": 1,
            "first_lease": 4,
            "cancel_after": None,
        }
        for _ in range(10)
    ]
    return Trace(shape, arrivals)


@pytest.mark.parametrize("chosen", seeds(600, 800, CHUNK), ids=name_of)
def test_every_request_that_ends_in_both_orders_has_the_same_tokens(chosen):
    num_compared = num_moved = 0
    for seed in chosen:
        fair, first = played(seed, "fair"), played(seed, "fcfs")
        num_moved += list(fair) != list(first)
        for choice in fair.keys() & first.keys():
            assert fair[choice] == first[choice], f"replay: HEADGATE_SIMULATION_SEED={seed}"
            num_compared += 1
    assert num_compared > 2 * len(chosen) or len(chosen) == 1
    assert num_moved > len(chosen) // 20 or len(chosen) == 1, "the order was always the same"


def played(seed, policy):
    """Tokens of the choices of each request that ended and was not cancelled, by when they began."""
    trace = simulation.history(seed, policy)
    trace.restarts = set()
    drive = trace.play()
    cancelled = {number for number, a in enumerate(trace.arrivals) if a["cancel_after"] is not None}
    return {
        (link, name, index): tokens
        for (link, name, index), tokens in drive.tokens.items()
        if isinstance(drive.endings.get((link, name)), Finished) and int(name[1:]) not in cancelled
    }
