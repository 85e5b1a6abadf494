"""What an attempt's timeline tells beside queue, chunks and first token: waits for a grammar and a lease, copies to the host
and back. Always in the order of time."""

from __future__ import annotations

import logging

import pytest
from engine_driver import LINK, Driver
from fakes import ScriptedRunner, encode, generate_request

from workers.protocol.messages import Cancel, ExtendLease

LONG = encode("abcdefghijklmnopqrstuvwxyz")


def names(drive: Driver, request_id: str, *wanted: str) -> list[str]:
    timeline = drive.endings[LINK, request_id].timeline
    offsets = [event.offset_us for event in timeline]
    assert offsets == sorted(offsets)
    return [event.name for event in timeline if not wanted or event.name in wanted]


class Compiler:
    """It has a grammar after a few looks, and keeps it."""

    def __init__(self, num_looks: int) -> None:
        self._num_looks = num_looks
        self._asked: list = []
        self._kept: set = set()

    def ask(self, key, text):
        if key in self._kept:
            return Anything()
        self._asked.append(key)
        return None

    def drop(self, key) -> bool:
        return False

    def take(self) -> list:
        self._num_looks -= 1
        if self._num_looks > 0 or not self._asked:
            return []
        ready, self._asked = self._asked, []
        self._kept.update(ready)
        return [(key, Anything()) for key in ready]


class Anything:
    """A compiled grammar that allows every text."""

    def start(self):
        return self


@pytest.fixture
def any_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.engine.sequences.sequence.begin", lambda *_: None)


@pytest.mark.usefixtures("any_text")
def test_the_wait_for_a_grammar_has_a_beginning_and_an_end():
    drive = Driver(grammars=Compiler(num_looks=3))
    drive.send(generate_request("first", LONG, 2, grammar="start: /.*/"))
    drive.run()
    drive.send(generate_request("again", LONG, 2, grammar="start: /.*/"))
    drive.run()
    assert names(drive, "first")[:4] == ["queued", "compiling", "compiled", "matched"]
    assert names(drive, "again")[:3] == ["queued", "compiled", "matched"], "it was compiled already"
    timeline = {event.name: event.offset_us for event in drive.endings[LINK, "first"].timeline}
    assert timeline["compiled"] - timeline["compiling"] == pytest.approx(20_000, abs=2), "two steps of 10 ms"


@pytest.mark.usefixtures("any_text")
def test_a_choice_that_was_cancelled_while_it_waited_for_its_grammar_does_not_come_back():
    drive = Driver(grammars=Compiler(num_looks=3))
    resume = ((0, (97,)), (1, (98,)))
    request = generate_request("r", LONG, 6, num_choices=2, grammar="start: /.*/", resume=resume, num_output_spent=2)
    drive.send(request)
    drive.step()
    drive.send(Cancel("r", 0))
    drive.run().check_idle()
    assert not drive.tokens[LINK, "r", 0] and len(drive.tokens[LINK, "r", 1]) == 5
    assert drive.endings[LINK, "r"].usage.output == 5


def test_the_wait_for_a_lease_ends_with_the_extension():
    drive = Driver()
    drive.send(generate_request("r", LONG, 20, lease_bound=5))
    for _ in range(12):
        drive.step()
    drive.send(ExtendLease("r", 1, 8, last=False))
    drive.step()
    drive.send(ExtendLease("r", 2, 20))
    drive.run()
    waits = names(drive, "r", "parked", "unparked")
    assert waits == ["parked", "unparked"] * (len(waits) // 2)
    assert len(waits) >= 2


def test_an_extension_that_nobody_waited_for_is_no_event():
    drive = Driver()
    drive.send(generate_request("r", LONG, 20, lease_bound=15))
    drive.step()
    drive.send(ExtendLease("r", 1, 20))
    drive.run()
    assert not names(drive, "r", "parked", "unparked")


def test_blocks_of_a_preempted_sequence_go_to_the_host_and_come_back():
    runner = ScriptedRunner(num_blocks=22, block_size=4)
    drive = Driver(runner, lag=0, host={"num_slots": 64, "delay": lambda: 1}, preempt="swap")
    for number in range(5):
        drive.send(generate_request(f"r{number}", encode("pqrst"[number] * 15), 30, tenant="ABCDE"[number]))
    drive.run(5000)
    moves = [names(drive, f"r{n}", "preempted", "swapped_out", "resumed", "swapped_in") for n in range(5)]
    moved = [move for move in moves if move]
    assert moved
    for move in moved:
        assert move == ["preempted", "swapped_out", "resumed", "swapped_in"] * (len(move) // 4)


def test_blocks_of_a_prompt_that_come_from_the_host_are_restored():
    drive = Driver(ScriptedRunner(num_blocks=20, block_size=4), lag=0, host={"num_slots": 64})
    for number in range(3):
        drive.send(generate_request(f"hot{number}", LONG, 4))
        drive.run()
    for number in range(4):
        drive.send(generate_request(f"flood{number}", encode(f"{number:02}" * 20), 4, tenant="flood"))
        drive.run()
    drive.send(generate_request("again", LONG, 4))
    drive.run()
    assert names(drive, "again", "matched", "restored", "swapped_in", "chunk")[:3] == ["matched", "restored", "chunk"]


def test_a_log_line_about_a_request_names_its_trace(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    drive = Driver()

    def broken(*_: object) -> None:
        raise KeyError("canary")

    monkeypatch.setattr(drive.engine._attempts._intake, "admit", broken)
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    with caplog.at_level(logging.ERROR):
        drive.send(generate_request("r", LONG, 2, traceparent=f"00-{trace_id}-b7ad6b7169203331-01"))
        drive.run()
    (line,) = [record for record in caplog.records if record.__dict__.get("event") == "request_broken"]
    assert (line.__dict__["request_id"], line.__dict__["trace_id"]) == ("r", trace_id)
