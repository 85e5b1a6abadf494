"""When a worker prepares what its first request with a grammar would wait for."""

from __future__ import annotations

import asyncio

from workers.engine.__main__ import warm_when_idle


class Worker:
    """Some polls in a row: is it ready, and has it nothing to do?"""

    def __init__(self, *polls: tuple[bool, bool]) -> None:
        self._polls = list(polls)
        self.num_asked = 0

    @property
    def ready(self) -> bool:
        self.num_asked += 1
        return self._polls[min(self.num_asked, len(self._polls)) - 1][0]

    @property
    def idle(self) -> bool:
        return self._polls[min(self.num_asked, len(self._polls)) - 1][1]


class Grammars:
    num_warmed = 0

    def warm(self) -> None:
        self.num_warmed += 1


def polls_until_warm(*polls: tuple[bool, bool]) -> int:
    worker, grammars = Worker(*polls), Grammars()
    asyncio.run(warm_when_idle(worker, grammars, num_polls=3, poll_s=0.0))
    assert grammars.num_warmed == 1
    return worker.num_asked


def test_the_compiler_is_started_when_the_worker_has_been_idle_for_a_while():
    assert polls_until_warm((True, True)) == 3


def test_it_is_not_started_before_the_worker_is_ready():
    assert polls_until_warm((False, True), (False, True), (True, True)) == 5


def test_a_request_in_between_puts_it_off():
    assert polls_until_warm((True, True), (True, True), (True, False), (True, True)) == 6
