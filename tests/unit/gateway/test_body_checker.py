"""Large bodies are checked in a process of their own, and in the gateway whenever there is none."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from gateway.base.errors import ApiError
from gateway.intake import body_checker
from gateway.intake.body_checker import BodyChecker
from gateway.intake.json_body import check, decode_object

LARGE = {"messages": [{"role": "user", "content": "x, [y] {z}"}] * 5_000, "n": 1}
SOUND = json.dumps(LARGE).encode()
BROKEN = [
    SOUND[:-1],
    b"[" + SOUND + b"]",
    SOUND[:-1] + b',"n":2}',
    SOUND[:-1] + b',"a":-0}',
    b"[" * 70_000,
    b"\xff" + SOUND,
]


@pytest.fixture
def checker() -> Iterator[BodyChecker]:
    checker = BodyChecker()
    yield checker
    checker.close()


@pytest.fixture(scope="module")
def shared_checker() -> Iterator[BodyChecker]:
    """One that has a process already."""
    checker = BodyChecker()
    started(checker)
    yield checker
    checker.close()


def started(checker: BodyChecker) -> int:
    """Waits until there is a process that answers. Returns its pid."""
    limit = time.monotonic() + 240
    before = checker.num_checked["process"]
    while checker.num_checked["process"] == before:
        assert time.monotonic() < limit
        time.sleep(0.01)
        checker.check(b"{}")
    (process,) = checker._idle
    return process.pid


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_the_first_body_waits_for_no_process_and_later_ones_are_checked_there(checker: BodyChecker) -> None:
    assert decode_object(SOUND, checker.check(SOUND)) == LARGE
    assert checker.num_checked == {"process": 0, "gateway": 1}
    started(checker)
    cuts = checker.check(SOUND)
    assert cuts == check(SOUND)
    assert len(cuts) > 1
    assert decode_object(SOUND, cuts) == LARGE


@pytest.mark.parametrize("body", BROKEN, ids=["end", "list", "twice", "zero", "depth", "utf8"])
def test_a_body_is_refused_there_as_it_is_refused_here(shared_checker: BodyChecker, body: bytes) -> None:
    with pytest.raises(ApiError) as here:
        check(body)
    number = shared_checker.num_checked["process"]
    with pytest.raises(ApiError) as there:
        shared_checker.check(body)
    assert there.value.__dict__ == here.value.__dict__
    assert shared_checker.num_checked["process"] == number + 1


def test_a_process_that_dies_costs_no_request_and_is_replaced_after_a_pause(
    checker: BodyChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = started(checker)
    os.kill(pid, signal.SIGKILL)
    number = checker.num_checked["gateway"]
    assert checker.check(SOUND) is None
    assert checker.check(SOUND) is None
    assert checker.num_checked["gateway"] == number + 2
    assert gone(pid)
    assert not checker._idle, "started again without a pause"
    checker._not_before = 0.0
    assert started(checker) != pid


def test_a_process_that_hangs_is_given_up_and_killed(checker: BodyChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_checker, "ANSWER_S", 1)
    monkeypatch.setattr(body_checker, "CLOSE_S", 0.1)
    pid = started(checker)
    os.kill(pid, signal.SIGSTOP)
    assert checker.check(SOUND) is None
    assert gone(pid)


def test_where_no_process_can_be_started_bodies_are_checked_here(
    checker: BodyChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    for _ in range(3):
        assert decode_object(SOUND, checker.check(SOUND)) == LARGE
    assert checker.num_checked == {"process": 0, "gateway": 3}


def test_its_end_ends_the_process_even_one_that_still_starts(checker: BodyChecker) -> None:
    checker.check(SOUND)
    (process,) = checker._idle
    checker.close()
    assert gone(process.pid)
    assert checker.check(SOUND) is None
    assert not checker._idle


def test_a_process_of_another_version_is_lost(checker: BodyChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = started(checker)
    monkeypatch.setattr(body_checker, "_ANSWERS", msgspec.msgpack.Decoder(int))
    assert checker.check(SOUND) is None
    assert gone(pid)


@pytest.mark.parametrize("num_bytes", [0, 2, 4, 14])
def test_a_gateway_that_dies_while_it_sends_leaves_no_process_and_no_traceback(num_bytes: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "gateway.intake.checking_process", str(os.getpid())],
            stdin=theirs.fileno(),
            stderr=subprocess.PIPE,
        )
        ours.sendall((struct.pack("!i", 1000) + b"0123456789")[:num_bytes])
    assert process.communicate(timeout=240)[1] == b""
    assert process.returncode == 0


class _Idle(body_checker._Process):
    """Has no process that could be ended."""

    def __init__(self) -> None:
        pass

    def end(self) -> None:
        pass


def test_threads_may_end_it_at_the_same_time(checker: BodyChecker) -> None:
    with ThreadPoolExecutor(3) as threads:
        for _ in range(20):
            checker._idle += [_Idle() for _ in range(2_000)]
            for closed in [threads.submit(checker.close) for _ in range(3)]:
                closed.result()
            assert not checker._idle
