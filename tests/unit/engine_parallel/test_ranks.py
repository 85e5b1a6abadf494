"""Processes that are no models in the place of ranks: what rank 0's process says and returns when they end."""

from __future__ import annotations

import subprocess
import sys

import pytest
from load import stretched

RANK_0 = """
import logging, sys, time
from pathlib import Path
from workers.engine.parallel.ranks import Ranks
from workers.engine.values.errors import StartError

logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stdout)
with Ranks(3, Path(sys.argv[1]) / "run" / "worker-0.1.ranks", [sys.executable, "-c", sys.argv[2]]) as ranks:
"""
OTHER = """
import os, socket, sys, time
from workers.engine.parallel.wire import Channel, Ended, Loaded, frame
rank, size, end, meeting, parent = sys.argv[1:]
channel = Channel(socket.socket(fileno=int(end)))
"""
WAIT = "ranks.wait_until_loaded(); print('loaded', flush=True); time.sleep(20)"
LOADED = "channel.send(frame(Loaded()))"


def run(tmp_path, rank_0, *others):
    program = OTHER + "\n".join(others)
    done = subprocess.run(
        [sys.executable, "-c", f"{RANK_0}    {rank_0}", str(tmp_path), program],
        capture_output=True,
        text=True,
        timeout=stretched(30),
    )
    return done.returncode, done.stdout.splitlines(), done.stderr


def test_ranks_that_load_and_leave_when_told_end_with_rank_0(tmp_path):
    status, said, errors = run(
        tmp_path,
        "ranks.wait_until_loaded(); print('loaded', flush=True)",
        LOADED,
        "said = channel.receive()",
        "os.write(1, f'{type(said).__name__} {rank} {size}\\n'.encode())",  # in one piece
    )
    assert (status, errors) == (0, "")
    assert said[-3] == "loaded" and sorted(said[-2:]) == ["Leave 1 3", "Leave 2 3"]


def test_a_rank_that_cannot_start_says_why_and_with_what_status(tmp_path):
    status, _, errors = run(
        tmp_path,
        WAIT,
        "if rank == '2': channel.send(frame(Ended('There is no device for rank 2.', 78))); sys.exit(78)",
        LOADED,
        "channel.receive()",
    )
    assert (status, errors) == (78, "There is no device for rank 2.\n")


@pytest.mark.parametrize(
    ("end", "ending"), [("os._exit(7)", "exit code 7"), ("os.kill(os.getpid(), 9)", "signal SIGKILL")]
)
def test_a_rank_that_ends_without_a_word_ends_the_worker(tmp_path, end, ending):
    status, said, errors = run(tmp_path, WAIT, LOADED, f"if rank == '1': time.sleep(0.5); {end}", "channel.receive()")
    assert (status, errors) == (2, "")
    assert said[-1] == f"Rank 1 of 3 ended with {ending}. The worker ends."


def test_the_sentence_of_rank_0_is_the_only_one_when_all_refuse_the_model(tmp_path):
    status, _, errors = run(
        tmp_path,
        "time.sleep(0.3); raise SystemExit('Refused.')",
        "time.sleep(1)",
        "channel.send(frame(Ended('Refused.', 78)))",
    )
    assert (status, errors) == (1, "Refused.\n")


def test_a_rank_that_does_not_leave_is_killed(tmp_path):
    status, said, _ = run(
        tmp_path,
        "import workers.engine.parallel.ranks as r; r._LEAVE_S = 0.3; ranks.wait_until_loaded()",
        LOADED,
        "print(os.getpid(), flush=True); time.sleep(60)",
    )
    assert status == 0
    for pid in said[-2:]:
        assert subprocess.run(["kill", "-0", pid], capture_output=True).returncode != 0


def test_a_rank_that_fails_in_a_step_says_so_before_it_ends(tmp_path):
    """The real process of a rank, but for its model."""
    status, said, errors = run(
        tmp_path,
        WAIT,
        "os.environ['HEADGATE_MODEL'] = 'none'",
        "import workers.engine.follower as follower",
        "def serve(told, rank, size, meeting, channel):",
        "    channel.send(frame(Loaded()))",
        "    time.sleep(0.5)",
        "    if rank == 2: raise RuntimeError('no memory for a step')",
        "    time.sleep(60)",
        "follower.serve = serve",
        "os._exit(follower.main(sys.argv[1:]))",
    )
    assert status == 2
    assert said[-1] == "Rank 2 of 3 failed: no memory for a step. The worker ends."
    (failure,) = [line for line in errors.splitlines() if "rank_failed" in line]
    assert '"worker":"worker-0/rank-2"' in failure
