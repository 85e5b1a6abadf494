"""Timelines: what is packed comes back, on the gateway's time, and never takes more than its room."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from accounting.values import timelines
from accounting.values.timelines import Event, Timeline

MARKS = [
    Event("accepted", 0),
    Event("authenticated", 1_000),
    Event("tokenized", 3_000),
    Event("admitted", 5_000),
    Event("dispatched", 6_000),
    Event("first_byte", 40_000),
    Event("finished", 110_000),
    Event("settled", 112_000),
    Event("last_byte", 113_000),
]
WORKER = [
    Event("queued", 0),
    Event("matched", 4_000, 7, 128),
    Event("chunk", 20_000, 8, 256),
    Event("chunk", 30_000, 9, 100),
    Event("first_token", 30_000, 9),
    Event("preempted", 50_000, 11),
    Event("resumed", 60_000, 13),
    Event("chunk", 65_000, 14, 300),
    Event("finished", 100_000, 40),
]


def packed_of(marks: Sequence[Event], worker: Sequence[Event]) -> str:
    return timelines.pack(
        *([timelines.entry(e.name, e.at_us, e.step, e.num_tokens) for e in each] for each in (marks, worker))
    )


def test_the_waterfall_goes_from_authentication_to_settlement() -> None:
    found = timelines.phases(timelines.unpack(packed_of(MARKS, WORKER)))
    assert [(phase.name, phase.start_us, phase.end_us, phase.num_tokens) for phase in found] == [
        ("authenticate", 0, 1_000, 0),
        ("tokenize", 1_000, 3_000, 0),
        ("admit", 3_000, 5_000, 0),
        ("dispatch", 5_000, 6_000, 0),
        ("queue", 6_000, 10_000, 0),
        ("prefill", 10_000, 26_000, 256),
        ("prefill", 26_000, 36_000, 100),
        ("decode", 36_000, 56_000, 0),
        ("preempted", 56_000, 66_000, 0),
        ("prefill", 66_000, 71_000, 300),
        ("decode", 71_000, 106_000, 0),
        ("wire", 106_000, 110_000, 0),
        ("settle", 110_000, 112_000, 0),
    ]


def test_a_refusal_ends_the_phase_that_decided() -> None:
    """The phase was missing, and the time until the refusal seemed to be nobody's."""
    answered = [Event("first_byte", 9_000), Event("last_byte", 9_500)]
    phases = timelines.phases(Timeline((*MARKS[:3], *answered)))
    assert [(phase.name, phase.start_us, phase.end_us) for phase in phases][2:] == [("admit", 3_000, 9_000)]
    phases = timelines.phases(Timeline((*MARKS[:4], *answered)))
    assert [(phase.name, phase.start_us, phase.end_us) for phase in phases][3:] == [("dispatch", 5_000, 9_000)]


def test_waits_and_copies_are_phases_and_what_took_no_time_is_none() -> None:
    worker = [
        Event("queued", 0),
        Event("compiling", 0),
        Event("compiled", 2_000),
        Event("matched", 2_000, 1),
        Event("restored", 5_000, 2, 64),
        Event("chunk", 9_000, 3, 8),
        Event("first_token", 9_000, 3),
        Event("parked", 12_000, 4),
        Event("unparked", 15_000),
        Event("preempted", 16_000, 5),
        Event("swapped_out", 16_500, -1, 72),
        Event("resumed", 20_000, 6),
        Event("swapped_in", 22_000, 7, 72),
        Event("finished", 30_000, 8),
    ]
    found = timelines.phases(timelines.unpack(packed_of([MARKS[4], MARKS[6]], worker)))
    assert [(phase.name, phase.start_us - 6_000, phase.end_us - 6_000) for phase in found] == [
        ("grammar", 0, 2_000),
        ("restore", 2_000, 5_000),
        ("prefill", 5_000, 9_000),
        ("decode", 9_000, 12_000),
        ("parked", 12_000, 15_000),
        ("decode", 15_000, 16_000),
        ("preempted", 16_000, 20_000),
        ("swap_in", 20_000, 22_000),
        ("decode", 22_000, 30_000),
        ("wire", 30_000, 104_000),
    ]


def test_what_is_packed_comes_back_whole() -> None:
    timeline = timelines.unpack(packed_of(MARKS, WORKER))
    assert timeline.gateway == tuple(MARKS)
    assert [(event.name, event.step, event.num_tokens) for event in timeline.worker] == [
        (event.name, event.step, event.num_tokens) for event in WORKER
    ]
    assert timeline.num_left_out == 0
    at_us = {event.name: event.at_us for event in MARKS}
    assert [timelines.placed_us(at_us, event.at_us) for event in WORKER] == [event.at_us for event in timeline.worker]


def test_a_worker_whose_clock_runs_fast_stays_inside_the_gateways_interval() -> None:
    timeline = timelines.unpack(packed_of(MARKS, [Event("queued", -5), Event("finished", 10**9)]))
    assert [event.at_us for event in timeline.worker] == [6_000, 110_000]


@pytest.mark.parametrize("name", ["preempted", "an event of a later version"])
def test_a_long_timeline_is_thinned_and_keeps_its_ends(name: str) -> None:
    events = [WORKER[0], *(Event(name, 10**9 + number * 10_000, number, 10**6) for number in range(254)), WORKER[-1]]
    packed = packed_of(MARKS, events)
    assert len(packed) <= timelines.MAX_PACKED_CHARS
    timeline = timelines.unpack(packed)
    assert (timeline.worker[0].name, timeline.worker[-1].name) == ("queued", "finished")
    assert timeline.num_left_out == len(events) - len(timeline.worker) > 0


def test_even_names_without_end_find_their_room() -> None:
    events = [Event(f"{number:0100d}", number) for number in range(256)]
    assert len(packed_of(events, events)) <= timelines.MAX_PACKED_CHARS
    assert len(packed_of([Event("x" * 9_000, 0)], [])) <= timelines.MAX_PACKED_CHARS


@pytest.mark.parametrize("text", ["", "x", "[]", "[[[99,1]],[],0]", '[[["a"]],[],0]', "[[[0,1,2,3,4]],[],0]", "null"])
def test_a_text_that_nobody_can_read_is_an_empty_timeline(text: str) -> None:
    assert timelines.unpack(text) == Timeline()
    assert timelines.phases(Timeline()) == []
