"""A team has fewer threads while other programs have its cores, and all of them soon after."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from kernels.cpu import compiled

if reason := compiled.refusal():
    pytest.skip(reason, allow_module_level=True)

from kernels.cpu import team
from kernels.cpu.team import TeamSize

CALL = 0.01


def drive(team: TeamSize, start: float, seconds: float, free: float) -> dict[int, int]:
    """Makes calls for so many seconds, in which the first of several threads has a core for a share of the time. Returns
    how many calls had each number of threads."""
    counts: dict[int, int] = {}
    now = start
    while now < start + seconds:
        threads = team.at(now)
        counts[threads] = counts.get(threads, 0) + 1
        now += CALL
        if threads > 1:
            team.add(CALL, CALL * free, now)
    return counts


def test_alone_it_keeps_all_threads() -> None:
    assert drive(TeamSize(2), 0.0, 60.0, free=0.8).keys() == {2}


def test_beside_others_it_has_one_thread_but_for_trials() -> None:
    counts = drive(TeamSize(2), 0.0, 60.0, free=0.3)
    assert counts[2] < 0.02 * counts[1]


def test_it_takes_all_threads_again_when_the_cores_are_free() -> None:
    team = TeamSize(2)
    drive(team, 0.0, 60.0, free=0.3)
    counts = drive(team, 60.0, 20.0, free=0.9)
    assert counts[2] > counts[1]
    assert drive(team, 80.0, 10.0, free=0.9).keys() == {2}
    # The pause is short again.
    assert drive(team, 90.0, 1.0, free=0.3)[2] >= 8


def test_a_larger_team_keeps_its_threads() -> None:
    assert drive(TeamSize(4), 0.0, 10.0, free=0.1).keys() == {4}


def test_a_thread_sleeps_while_another_holds_a_piece() -> None:
    """One thread waits for a stage of which another one has the last piece: the system counts it as asleep, so that its
    core is free, and it wakes when the piece is done."""
    from numba import njit

    finish, done = (njit(nogil=True)(of.py_func) for of in (team.finish, team.done))
    counters = torch.zeros(8 * team.LINE, dtype=torch.uint8)
    stage = counters.data_ptr()
    done(stage, 2, 2)  # this compiles both
    finish(stage, 2, 1)
    waiter = threading.Thread(target=finish, args=(stage, 2, 2))
    waiter.start()
    stat = Path(f"/proc/self/task/{waiter.native_id}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != "S":
        time.sleep(0.001)
    assert int(counters[2 * team.LINE + 8]) == 1
    done(stage, 2, 2)
    waiter.join()
