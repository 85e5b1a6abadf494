"""A thread that waits for a piece leaves its core."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels.cpu import compiled

if reason := compiled.refusal():
    pytest.skip(reason, allow_module_level=True)

from kernels.cpu import team


@pytest.fixture
def look_again() -> Iterator[None]:
    team._parallel.cache_clear()
    yield
    team._parallel.cache_clear()


@pytest.mark.usefixtures("look_again")
def test_a_library_below_a_path_with_a_space_is_found_and_one_that_is_gone_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps = Path("/proc/self/maps").read_text()
    [own] = {line.split(None, 5)[5] for line in maps.splitlines() if re.search(r"/libgomp[^/]*$", line)}
    place = tmp_path / "my models"
    place.mkdir()
    (place / Path(own).name).symlink_to(own)
    gone = f"7f00-7f01 r-xp 00000000 00:00 1   {tmp_path}/libgomp.so.1\n"
    spaced = f"7f01-7f02 r-xp 00000000 00:00 2   {place / Path(own).name}\n"
    monkeypatch.setattr(Path, "read_text", lambda path, **how: "7f00-7f00 rw-p 00000000 00:00 0 \n" + gone + spaced)
    assert team._parallel() is not None


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
