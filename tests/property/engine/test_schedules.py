"""Whole histories of a worker in simulated time, one per seed: see tests/simulation.py for what each one checks.

`HEADGATE_SIMULATION_SEED=n` replays a single one.
"""

from __future__ import annotations

import pytest
import simulation
from simulation import CHUNK, name_of, play_all, seeds

pytestmark = pytest.mark.rest


@pytest.mark.parametrize("chosen", seeds(0, 1000, CHUNK), ids=name_of)
def test_any_schedule_keeps_every_law(chosen):
    counts = play_all(chosen)
    for name in ("num_handed_over", "num_swapped_out", "num_swapped_in"):
        assert counts[name] or len(chosen) == 1, f"never happened: {name}"


@pytest.mark.parametrize("seed", [4063, 6738])
def test_a_copy_to_the_host_comes_behind_the_copies_of_a_step_that_did_not_fit(seed):
    simulation.play(seed)


@pytest.mark.slow
@pytest.mark.parametrize("chosen", seeds(1000, 101_000, 2000), ids=name_of)
def test_a_hundred_thousand_schedules_keep_every_law(chosen):
    play_all(chosen)


def test_a_seed_is_one_history():
    first = [simulation.play(seed) for seed in range(40, 60)]
    assert first == [simulation.play(seed) for seed in range(40, 60)]
    assert any(counts["num_restored"] for *_, counts in first)
