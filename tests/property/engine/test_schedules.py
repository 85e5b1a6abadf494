"""Whole histories of a worker in simulated time, one per seed: see tests/simulation.py for what each one checks.

`HEADGATE_SIMULATION_SEED=n` replays a single one.
"""

from __future__ import annotations

import os

import pytest
import simulation

CHUNK = 250


def seeds(count):
    told = os.environ.get("HEADGATE_SIMULATION_SEED")
    return [[int(told)]] if told else [range(i, i + CHUNK) for i in range(0, count, CHUNK)]


def play_all(chosen):
    """Returns how many sequences were handed over to a fresh worker."""
    num_handed_over = 0
    for seed in chosen:
        try:
            num_handed_over += simulation.play(seed)[-1]
        except Exception as error:
            error.add_note(f"replay: HEADGATE_SIMULATION_SEED={seed}")
            raise
    return num_handed_over


@pytest.mark.parametrize("chosen", seeds(2000), ids=lambda chosen: f"from-{chosen[0]}")
def test_any_schedule_keeps_every_law(chosen):
    num_handed_over = play_all(chosen)
    assert num_handed_over or len(chosen) == 1, "no worker was ever restarted under load"


@pytest.mark.slow
def test_a_hundred_thousand_schedules_keep_every_law():
    play_all(range(2000, 102_000))


def test_a_seed_is_one_history():
    assert [simulation.play(seed) for seed in range(20)] == [
        simulation.play(seed) for seed in range(20)
    ]
