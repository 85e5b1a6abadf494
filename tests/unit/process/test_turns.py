"""Short turns: who has them, and who keeps what an operator chose."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from load import stretched

from workers.process import turns

needs_linux_6_12 = pytest.mark.skipif(turns.turn_ns() is None, reason="this system does not tell the length of a turn")


def told(script: str) -> list[str]:
    """What a process of its own prints: a test must not change the turns of the others."""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=stretched(30)
    )
    return done.stdout.split()


@needs_linux_6_12
def test_later_threads_have_short_turns_and_earlier_ones_do_not() -> None:
    script = """
import os, threading
from workers.process import turns
before = os.nice(3)
asked = threading.Event()
found = []
def look():
    asked.wait()
    found.append(turns.turn_ns() == turns.TURN_NS)
earlier = threading.Thread(target=look)
earlier.start()
assert turns.shorten()
asked.set()
earlier.join()
later = threading.Thread(target=look)
later.start()
later.join()
print(*found, turns.turn_ns() == turns.TURN_NS, os.nice(0) == before)
"""
    assert told(script) == ["False", "True", "True", "True"]


@needs_linux_6_12
def test_a_policy_that_an_operator_chose_stays() -> None:
    script = """
import os
from workers.process import turns
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
before = turns.turn_ns()
print(turns.shorten(), turns.turn_ns() == before, os.sched_getscheduler(0) == os.SCHED_IDLE)
"""
    assert told(script) == ["False", "True", "True"]


@needs_linux_6_12
def test_who_steps_back_has_ordinary_turns_and_a_lower_priority_with_its_session() -> None:
    script = """
import os
from workers.process import turns
before = turns.turn_ns()
nice = os.nice(0)
os.setsid()
turns.shorten()
turns.step_back(7)
group = turns.AUTOGROUP.read_text().split()[-1] if turns.AUTOGROUP.exists() else "7"
print(turns.turn_ns() == before, os.nice(0) == min(nice + 7, 19), group)
"""
    assert told(script) == ["True", "True", "7"]


def test_who_may_not_step_back_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(_: int) -> int:
        raise PermissionError("as under systemd's SystemCallFilter=~@resources")

    monkeypatch.setattr(os, "nice", forbidden)
    monkeypatch.setattr(turns, "_call", lambda *_: False)
    turns.step_back(7)


def test_the_priority_of_a_session_is_set_although_another_process_just_set_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries = [BlockingIOError(), BlockingIOError(), None]

    class Busy:
        def write_text(self, text: str) -> None:
            assert text == "7"
            if (error := tries.pop(0)) is not None:
                raise error

    monkeypatch.setattr(turns, "AUTOGROUP", Busy())
    monkeypatch.setattr(time, "sleep", lambda _: None)
    turns._step_back_as_session(7)
    assert not tries


def test_nothing_is_changed_where_nobody_knows_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns.platform, "machine", lambda: "vax")
    assert turns.turn_ns() is None
    assert not turns.shorten(os.getpid())


def test_the_gateway_hands_over_the_interpreter_lock_soon() -> None:
    script = """
import sys
from gateway.__main__ import answer_promptly
from workers.process import turns
before = sys.getswitchinterval()
answer_promptly()
print(sys.getswitchinterval() <= before / 10, turns.turn_ns() in (None, turns.TURN_NS))
"""
    assert told(script) == ["True", "True"]
