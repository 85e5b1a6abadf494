"""A request keeps its lease while it runs, however late the loop comes to it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from gateway.generation.choices import Choice
from gateway.generation.generation import Generation
from gateway.metering.lease_keeper import LeaseKeeper
from gateway.metering.leases import LOW_WATER, Extension
from gateway.parsers.plain import PlainText
from gateway.routing.links.link import Mailbox
from workers.protocol.messages import SamplingParams, TokenDelta

STEP = 2 * LOW_WATER


class Admitted:
    """An admission whose limiter grants `STEP` tokens a time. `on_extended` is called two rounds of the loop later:
    after the task that extends has ended, and before anybody was told."""

    def __init__(self) -> None:
        self.lease_bound = STEP
        self.budget_stop = None
        self.on_extended = lambda: None

    async def extend(self, num_received: int, *, cached_tokens: int | None = None) -> Extension:
        self.lease_bound += STEP
        loop = asyncio.get_running_loop()
        loop.call_soon(lambda: loop.call_soon(self.on_extended))
        return Extension(1, self.lease_bound)


def order_of(num_choices: int) -> SimpleNamespace:
    order = SimpleNamespace(
        num_choices=num_choices, max_tokens=10 * STEP, beams=None, pooling=None, form=None, make_parser=PlainText
    )
    order.sampling = SamplingParams(seed=0)
    order.model, order.rules = SimpleNamespace(tokenizer=None), SimpleNamespace(include_stop=False)
    order.prompt, order.is_bought, order.to_send = (1, 2), False, lambda *_: None
    return order


class Link:
    """A link whose calls hear the bounds of their lease."""

    def __init__(self) -> None:
        self.bounds: list[int] = []

    def start_call(self, *_: object) -> SimpleNamespace:
        return SimpleNamespace(extend=lambda bound, **_: self.bounds.append(bound), close=lambda: None)


@pytest.mark.parametrize(("first", "num_choices", "extended"), [(1, 4, True), (4, 4, False), (1, 1, False)])
async def test_a_first_lease_that_is_shorter_than_the_choices_is_extended_before_the_first_token(
    monkeypatch: pytest.MonkeyPatch, first: int, num_choices: int, extended: bool
) -> None:
    monkeypatch.setattr("gateway.generation.generation.ChoiceText", lambda *_: SimpleNamespace(stop=None))
    admitted, link = Admitted(), Link()
    admitted.lease_bound, admitted.root, admitted.lease_seq = first, "root", 0
    generation = Generation(order_of(num_choices), admitted, Mailbox(), 0)
    generation.dispatch(link)
    for _ in range(4):
        await asyncio.sleep(0)
    assert link.bounds == ([first + STEP] if extended else [])
    generation.close()


async def test_tokens_that_come_in_the_round_in_which_an_extension_ends_start_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nothing = SimpleNamespace(text="", entries=())
    monkeypatch.setattr("gateway.generation.generation.ChoiceText", lambda *_: SimpleNamespace(stop=None))
    monkeypatch.setattr(Choice, "take", lambda *_, **__: nothing)
    admitted = Admitted()
    generation = Generation(order_of(1), admitted, Mailbox(), 0)
    received = STEP - LOW_WATER

    def receive_all() -> None:
        """After a stall all tokens up to the bound come in one read; then the worker waits for the next bound."""
        admitted.on_extended = lambda: None
        rest = admitted.lease_bound - received
        generation.handle(TokenDelta("r", 0, 0, received, (1,) * rest))

    admitted.on_extended = receive_all
    generation.handle(TokenDelta("r", 0, 0, 0, (1,) * received))
    for _ in range(10):
        await asyncio.sleep(0)
    assert admitted.lease_bound == 3 * STEP
    generation.close()


async def test_a_hold_does_not_take_the_last_lease_back() -> None:
    """The worker would park at the bound for ever: nobody asks the limiter again once a budget has ended the request."""
    told: list[tuple[int, bool]] = []
    admitted = Admitted()
    spender = SimpleNamespace(
        call=SimpleNamespace(extend=lambda bound, *, last, wait_ms: told.append((bound, last))),
        num_received=STEP,
        num_cached=None,
        draws=True,
    )
    keeper = LeaseKeeper(admitted, 10 * STEP, lambda error: None)
    keeper.hold(spender)
    admitted.budget_stop = object()
    keeper.hold(spender)
    keeper.moved(spender)
    assert told == [(STEP, False), (STEP, True), (STEP, True)]
