"""A mailbox hands events on in order, to a reader that waits for some or to a function that takes each at once."""

from __future__ import annotations

import asyncio

import pytest

from gateway.routing.links.link import Event, Lost, Mailbox


def lost(number: int) -> Lost:
    return Lost(str(number))


class Taken:
    """Takes events until there are `most`, or until one of them is the fault."""

    def __init__(self, most: int, fault: str = "") -> None:
        self.whys: list[str] = []
        self._most = most
        self._fault = fault

    def __call__(self, call: int, event: Event) -> bool:
        assert isinstance(event, Lost)
        if event.why == self._fault:
            raise ValueError(self._fault)
        self.whys.append(event.why)
        return len(self.whys) == self._most


async def left(mailbox: Mailbox) -> list[str]:
    return [event.why for _, event in await mailbox.take(0.0) if isinstance(event, Lost)]


async def test_each_event_is_taken_where_it_comes_and_those_that_waited_before_it() -> None:
    mailbox, taken = Mailbox(), Taken(4)
    mailbox.put(0, lost(1))
    mailbox.put(0, lost(2))
    feeding = asyncio.create_task(mailbox.feed(taken))
    await asyncio.sleep(0)
    assert taken.whys == ["1", "2"]
    mailbox.put(0, lost(3))
    assert taken.whys == ["1", "2", "3"]
    mailbox.put(0, lost(4))
    mailbox.put(0, lost(5))
    await feeding
    assert taken.whys == ["1", "2", "3", "4"]
    assert await left(mailbox) == ["5"]


async def test_events_that_came_before_may_be_enough() -> None:
    mailbox, taken = Mailbox(), Taken(1)
    mailbox.put(0, lost(1))
    mailbox.put(0, lost(2))
    await mailbox.feed(taken)
    assert (taken.whys, await left(mailbox)) == (["1"], ["2"])


async def test_a_fault_reaches_the_reader_and_not_the_one_who_puts() -> None:
    mailbox, taken = Mailbox(), Taken(9, fault="2")
    feeding = asyncio.create_task(mailbox.feed(taken))
    await asyncio.sleep(0)
    for number in (1, 2, 3):
        mailbox.put(0, lost(number))
    with pytest.raises(ValueError, match="2"):
        await feeding
    mailbox.forgive()
    assert (taken.whys, await left(mailbox)) == (["1"], ["3"])


async def test_a_fault_among_the_events_that_waited_reaches_the_reader() -> None:
    mailbox = Mailbox()
    mailbox.put(0, lost(1))
    with pytest.raises(ValueError, match="1"):
        await mailbox.feed(Taken(9, fault="1"))


async def test_a_failure_ends_the_feeding_before_any_further_event() -> None:
    mailbox, taken = Mailbox(), Taken(9)
    feeding = asyncio.create_task(mailbox.feed(taken))
    await asyncio.sleep(0)
    mailbox.fail(RuntimeError("drain"))
    mailbox.put(0, lost(1))
    with pytest.raises(RuntimeError, match="drain"):
        await feeding
    mailbox.forgive()
    assert (taken.whys, await left(mailbox)) == ([], ["1"])


async def test_events_after_a_cancelled_feeding_wait_for_the_next_reader() -> None:
    mailbox, taken = Mailbox(), Taken(9)
    feeding = asyncio.create_task(mailbox.feed(taken))
    await asyncio.sleep(0)
    mailbox.put(0, lost(1))
    feeding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await feeding
    mailbox.put(0, lost(2))
    assert (taken.whys, await left(mailbox)) == (["1"], ["2"])


async def test_a_silence_ends_the_feeding_and_an_event_puts_it_off() -> None:
    mailbox, taken = Mailbox(), Taken(9)
    began = asyncio.get_running_loop().time()
    feeding = asyncio.create_task(mailbox.feed(taken, 1.0))
    for number in (1, 2, 3):
        await asyncio.sleep(0.05)
        mailbox.put(0, lost(number))
    assert await feeding is False
    assert asyncio.get_running_loop().time() - began >= 1.1
    mailbox.put(0, lost(4))
    assert (taken.whys, await left(mailbox)) == (["1", "2", "3"], ["4"])


async def test_what_is_enough_is_no_silence() -> None:
    mailbox = Mailbox()
    feeding = asyncio.create_task(mailbox.feed(Taken(1), 10.0))
    await asyncio.sleep(0)
    mailbox.put(0, lost(1))
    assert await feeding is True
