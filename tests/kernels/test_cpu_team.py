"""A thread that waits for a piece leaves its core."""

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
