"""Beats of a loop, and the stack of one that stands still. Times are those of a scripted clock, where a clock decides."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import types

import pytest
from load import stretched

from workers.process import heartbeat
from workers.process.heartbeat import BEAT_S, BLOCKED_S, LOG_EVERY_S, Heartbeat
from workers.process.logs import JsonFormatter, TextFormatter


async def test_a_loop_beats_on_its_descriptor_until_the_end() -> None:
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    beating = Heartbeat(fd, beat_s=0.01)
    beating.begin()
    num_beats = 0
    async with asyncio.timeout(stretched(10)):
        while num_beats < 3:
            await asyncio.sleep(0.01)
            with contextlib.suppress(BlockingIOError):
                num_beats += os.eventfd_read(fd)
    beating.end()
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(fd)
    await asyncio.sleep(0.05)
    with pytest.raises(BlockingIOError):
        os.eventfd_read(fd)
    os.close(fd)


class Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.event = threading.Event()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        self.event.set()


@pytest.fixture
def told():
    handler = Told()
    heartbeat.logger.addHandler(handler)
    yield handler
    heartbeat.logger.removeHandler(handler)


async def test_the_stack_of_a_loop_that_stands_still_is_logged_by_its_places(told: Told) -> None:
    beating = Heartbeat(beat_s=0.01, blocked_s=0.05)
    beating.begin()

    def hold_up(secret: str) -> bool:
        return told.event.wait(30)

    assert hold_up("a prompt")
    beating.end()
    [record] = told.records
    written = JsonFormatter().format(record)
    assert '"event":"loop_blocked"' in written
    assert f'{__file__}:{hold_up.__code__.co_firstlineno + 1} hold_up"' in written
    assert "a prompt" not in written
    assert f"\n    {__file__}:" in TextFormatter().format(record)


HEALTHY, LATE = (0.0, 0.01, True), (0.0, 0.0, False)
STOPPED = (600.0, 0.0, False)
"""The process was stopped for ten minutes, and its thread runs before its loop does."""
HELD = (5.0, 5.0, False)
"""The loop held the interpreter's lock for five seconds, so that the thread could not look."""


def waits_of(monkeypatch: pytest.MonkeyPatch, steps: list[tuple[float, float, bool]]) -> list[float]:
    """Runs the thread through waits: how much longer than asked each took, what the process used, whether it beat."""
    now, used, waits = 1000.0, 0.0, list[float]()
    beating = Heartbeat()
    beating._beaten_at = now

    class Ended:
        def wait(self, seconds: float) -> bool:
            nonlocal now, used
            waits.append(seconds)
            if len(waits) > len(steps):
                return True
            longer, has_used, beat = steps[len(waits) - 1]
            now, used = now + seconds + longer, used + has_used
            if beat:
                beating._beaten_at = now
            return False

    monkeypatch.setattr(heartbeat, "time", types.SimpleNamespace(monotonic=lambda: now, process_time=lambda: used))
    monkeypatch.setattr(beating, "_has_ended", Ended())
    beating._watch(threading.get_ident())
    return waits


def test_a_loop_that_turns_is_looked_at_once_in_two_seconds(monkeypatch: pytest.MonkeyPatch, told: Told) -> None:
    assert waits_of(monkeypatch, [HEALTHY] * 3) == [BEAT_S + BLOCKED_S] * 4
    assert not told.records


def test_one_that_stands_still_is_logged_once_a_minute(monkeypatch: pytest.MonkeyPatch, told: Told) -> None:
    assert waits_of(monkeypatch, [LATE, LATE, HEALTHY])[1:] == [LOG_EVERY_S, LOG_EVERY_S, BEAT_S + BLOCKED_S]
    assert len(told.records) == 2


def test_a_process_that_was_stopped_gets_another_second(monkeypatch: pytest.MonkeyPatch, told: Told) -> None:
    assert waits_of(monkeypatch, [STOPPED, HEALTHY])[1:] == [BLOCKED_S, BEAT_S + BLOCKED_S]
    assert not told.records
    waits_of(monkeypatch, [STOPPED, LATE])
    assert len(told.records) == 1


def test_a_loop_that_held_the_lock_is_logged_as_soon_as_it_gives_it_up(
    monkeypatch: pytest.MonkeyPatch, told: Told
) -> None:
    waits_of(monkeypatch, [HELD])
    assert len(told.records) == 1
