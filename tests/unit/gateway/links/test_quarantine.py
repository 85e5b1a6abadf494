"""Which requests are suspected when workers end, and which are refused. No sockets, and time stands still unless moved."""

from __future__ import annotations

from array import array

import pytest

from gateway.routing.links import quarantine
from gateway.routing.links.quarantine import Quarantine, fingerprint

HOLD_S = 600.0


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def one(time: Time) -> Quarantine:
    return Quarantine(HOLD_S, time)


def ended(one: Quarantine, process: str, first: list[bytes], *, is_certain: bool = True) -> None:
    one.link_ended("w", process, first, is_certain=is_certain)


def test_a_link_that_was_cut_counts_once_another_process_has_the_workers_name(one):
    ended(one, "first", [b"a"])
    ended(one, "second", [b"a"], is_certain=False)
    assert (one.is_suspect(b"a"), one.is_guilty(b"a")) == (True, False)
    one.linked("another worker", "third")
    assert not one.is_guilty(b"a")
    one.linked("w", "third")
    assert one.is_guilty(b"a")


def test_nobody_is_suspected_before_a_process_ends(one):
    assert one.is_empty
    assert not one.is_suspect(b"a")


def test_a_request_that_was_alone_is_guilty_at_the_second_process(one):
    ended(one, "first", [b"a"])
    assert (one.is_suspect(b"a"), one.is_guilty(b"a")) == (True, False)
    ended(one, "second", [b"a"])
    assert one.is_guilty(b"a")
    assert one.counts() == (1, 1)


@pytest.mark.parametrize("others", [[[b"b"], []], [[], [b"b"]]])
def test_to_be_alone_once_is_enough(one, others):
    for process, beside in enumerate(others):
        ended(one, str(process), [b"a", *beside])
    assert one.is_guilty(b"a")
    assert not one.is_guilty(b"b")


def test_beside_others_each_time_it_takes_a_third_process(one):
    for process in ("first", "second"):
        ended(one, process, [b"a", process.encode()])
        assert not one.is_guilty(b"a")
    ended(one, "third", [b"a", b"z"])
    assert one.is_guilty(b"a")


def test_the_same_process_counts_once(one):
    for _ in range(3):
        ended(one, "first", [b"a"])
    assert not one.is_guilty(b"a")


def test_a_process_that_lives_after_all_is_taken_back(one):
    """Only its link had ended: the network was cut, or a step took long."""
    ended(one, "first", [b"a", b"b"])
    ended(one, "second", [b"a"])
    assert one.is_guilty(b"a")
    one.linked("w", "second")
    assert one.is_guilty(b"a")
    one.lives("second")
    assert (one.is_suspect(b"a"), one.is_guilty(b"a")) == (True, False)
    one.lives("first")
    assert one.is_empty


def test_who_gets_through_the_first_steps_is_a_suspect_no_more(one):
    ended(one, "first", [b"a"])
    one.passed(b"a")
    assert one.is_empty
    one.passed(b"a")  # nobody has to ask before


def test_a_suspect_is_forgotten_some_time_after_its_last_process(one, time):
    ended(one, "first", [b"a"])
    time.now = HOLD_S - 1
    ended(one, "second", [b"a"])
    time.now = 2 * HOLD_S - 2
    assert one.is_guilty(b"a")
    time.now = 2 * HOLD_S
    assert one.is_empty
    assert one.counts() == (0, 0)
    assert not one.is_suspect(b"a")
    ended(one, "third", [b"a"])
    assert not one.is_guilty(b"a")


def test_without_a_time_to_hold_nobody_is_suspected():
    one = Quarantine(0)
    ended(one, "first", [b"a"])
    assert one.is_empty


def test_the_oldest_are_forgotten_where_there_are_too_many(one, monkeypatch):
    monkeypatch.setattr(quarantine, "MAX_SUSPECTS", 3)
    ended(one, "first", [b"a", b"b"])
    ended(one, "second", [b"c", b"a"])
    ended(one, "third", [b"d", b"e"])
    assert [name for name in (b"a", b"b", b"c", b"d", b"e") if one.is_suspect(name)] == [b"a", b"d", b"e"]


def test_a_worker_is_reserved_while_a_suspect_is_on_its_way(one):
    with one.reserved("w0"), one.reserved("w0"):
        assert (one.is_reserved("w0"), one.is_reserved("w1")) == (True, False)
    assert not one.is_reserved("w0")


def test_the_same_prompt_of_another_tenant_model_or_adapter_is_another_request():
    prompt = array("i", range(40))
    same = fingerprint("t", "m", "", prompt)
    assert same == fingerprint("t", "m", "", array("i", range(40)))
    others = [
        fingerprint("u", "m", "", prompt),
        fingerprint("t", "n", "", prompt),
        fingerprint("t", "m", "a", prompt),
        fingerprint("t", "m", "", prompt[:-1]),
        fingerprint("tm", "", "", prompt),
    ]
    assert len({same, *others}) == 6


def test_a_long_prompt_is_told_by_its_ends_and_its_length():
    prompt = array("i", range(100_000))
    other_end, other_begin = array("i", prompt), array("i", prompt)
    other_end[-1] = other_begin[0] = 7
    prompts = (prompt, other_end, other_begin, prompt[:-1], prompt[:5000], prompt[:4096])
    assert len({fingerprint("t", "m", "", one) for one in prompts}) == len(prompts)
