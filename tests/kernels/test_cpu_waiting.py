"""Threads of a worker do not look for work for longer than a turn of the system's scheduler."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from kernels.cpu import compiled, waiting


def test_a_users_own_setting_remains() -> None:
    for own in ({"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}):
        environment = dict(own)
        waiting.bound(environment)
        assert environment == own


def test_libgomp_takes_the_bound() -> None:
    """The library prints what it has read when torch loads it."""
    code = "from kernels.cpu import waiting; waiting.bound(); import torch; torch.ones(1 << 16).sum()"
    taken = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}
    environment = {name: value for name, value in os.environ.items() if name not in taken}
    told = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {"OMP_DISPLAY_ENV": "VERBOSE"},
        capture_output=True,
        text=True,
        check=True,
    )
    if "GOMP_SPINCOUNT" not in told.stderr:
        pytest.skip("torch has another OpenMP library here")
    assert "GOMP_SPINCOUNT = '10000'" in told.stderr


def test_a_thread_sleeps_while_another_holds_a_piece() -> None:
    """One thread waits for a stage of which another one has the last piece: the system counts it as asleep, so that its
    core is free, and it wakes when the piece is done."""
    if reason := compiled.refusal():
        pytest.skip(reason)
    from numba import njit

    from kernels.cpu import team

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
