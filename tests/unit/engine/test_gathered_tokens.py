"""Tokens of an answer that is read as a whole travel many at once, and none is lost at any ending."""

from __future__ import annotations

import pytest
from engine_driver import LINK, Driver
from fakes import ScriptedRunner, encode, generate_request

from gateway.metering.leases import LOW_WATER
from workers.engine.engine import Drain
from workers.protocol.messages import GATHERED_TOKENS, Cancel, ExtendLease

KEY = (LINK, "r")


@pytest.fixture(params=[0, 1], ids=["at-once", "one-step-late"])
def drive(request: pytest.FixtureRequest) -> Driver:
    return Driver(ScriptedRunner(num_blocks=64, block_size=4), lag=request.param)


def sizes(drive: Driver) -> list[int]:
    return [len(delta.tokens) for delta in drive.records]


def test_the_first_token_travels_alone_and_the_others_by_sixteen(drive: Driver) -> None:
    drive.send(generate_request("r", encode("hello"), 40, gather=True))
    drive.run()
    assert sizes(drive) == [1, GATHERED_TOKENS, GATHERED_TOKENS, 40 - 1 - 2 * GATHERED_TOKENS]
    assert drive.records[0].prompt is not None
    assert drive.finishes[(*KEY, 0)] == "length"


def test_the_tokens_are_those_of_a_request_that_gathers_none(drive: Driver) -> None:
    drive.send(generate_request("r", encode("hello"), 40, gather=True), generate_request("s", encode("hello"), 40))
    drive.run()
    assert drive.tokens[(*KEY, 0)] == drive.tokens[LINK, "s", 0]


@pytest.mark.parametrize("num_steps", [2, 6, 20])
def test_a_cancelled_request_sends_what_it_has_gathered_with_the_ending(drive: Driver, num_steps: int) -> None:
    drive.send(generate_request("r", encode("hello"), 60, gather=True))
    for _ in range(num_steps):
        drive.step()
    drive.send(Cancel("r"))
    drive.run()
    assert drive.finishes[(*KEY, 0)] == "cancelled"
    assert len(drive.tokens[(*KEY, 0)]) == drive.endings[KEY].usage.output > 0


def test_a_spent_budget_sends_what_was_gathered(drive: Driver) -> None:
    drive.send(generate_request("r", encode("hello"), 60, gather=True, lease_bound=9))
    for _ in range(30):
        drive.step()
    assert sizes(drive) == [1], "it waits for its lease with eight tokens that nobody needs yet"
    drive.send(ExtendLease("r", 1, 9, last=True))
    drive.run()
    assert drive.finishes[(*KEY, 0)] == "budget"
    assert len(drive.tokens[(*KEY, 0)]) == 9


def test_a_request_that_is_handed_back_tells_how_many_tokens_it_drew(drive: Driver) -> None:
    drive.send(generate_request("r", encode("hello"), 60, gather=True))
    for _ in range(6):
        drive.step()
    drive.send(generate_request("late", encode("hello"), 5))
    drive.inbox.append((0, Drain(now=True)))
    drive.run()
    assert drive.endings[KEY].usage.output >= len(drive.tokens[(*KEY, 0)]) == 1


def test_a_lease_is_extended_long_before_what_was_gathered_can_hide_that_it_is_due() -> None:
    assert 2 * GATHERED_TOKENS <= LOW_WATER
