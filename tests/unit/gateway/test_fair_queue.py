"""S3: whose turn it is before any limit counts, and how a flood of one tenant waits behind itself."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.intake.fair_queue import MAX_REMEMBERED, FairQueue
from gateway.intake.text_work import SMALL_BYTES, TextWork

LARGE = 4 * 2**20


def drained(queue: FairQueue[str]) -> list[str]:
    found = []
    while (item := queue.pop()) is not None:
        found.append(item)
    return found


def test_s3_a_tenant_who_comes_behind_a_flood_is_next() -> None:
    queue: FairQueue[str] = FairQueue()
    for i in range(8):
        queue.push("flood", LARGE, f"flood {i}")
    assert queue.pop() == "flood 0"
    queue.push("victim", LARGE, "victim")
    assert drained(queue)[:2] == ["victim", "flood 1"]


def test_shares_are_equal_in_bytes_not_in_requests() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(10):
        queue.push("large", 1000, "large")
    for _ in range(100):
        queue.push("small", 100, "small")
    first = Counter(drained(queue)[:55])
    assert first["large"] in range(4, 7)
    assert first["small"] in range(48, 52)


def test_being_away_earns_nothing() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("steady", 1, "s")
    for _ in range(50):
        queue.push("steady", 1, "s")
        assert queue.pop() == "s"
    for _ in range(20):
        queue.push("back", 1, "b")
        queue.push("steady", 1, "s")
    assert Counter(drained(queue)[:20]) == {"b": 10, "s": 10}


def test_who_left_pays_nothing_and_only_small_ones_pass_a_small_gate() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("a", 100, "large")
    queue.push("b", 1, "small")
    assert queue.pop(most_units=10) == "small"
    assert queue.pop(most_units=10) is None
    queue.remove("a", "large")
    assert queue.pop() is None
    queue.push("a", 1, "a")
    queue.push("c", 1, "c")
    assert drained(queue) == ["a", "c"]


def test_tenants_that_are_gone_are_forgotten() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("steady", 1, "x")
    for i in range(5 * MAX_REMEMBERED):
        queue.push("steady", 1, "x")
        queue.push(f"t{i}", 1, "x")
        queue.pop()
        queue.pop()
    assert len(queue._had) <= 2 * MAX_REMEMBERED


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)) | st.none(), min_size=1, max_size=200))
def test_while_two_wait_neither_gets_more_than_one_item_ahead(steps: list[tuple[str, int] | None]) -> None:
    """The bound of start-time fair queueing, over every stretch in which both wait."""
    queue: FairQueue[tuple[str, int]] = FairQueue()
    waiting: Counter[str] = Counter()
    had: dict[frozenset[str], Counter[str]] = {}
    for step in [*steps, *[None] * len(steps)]:
        if step is not None:
            queue.push(step[0], step[1], step)
            waiting[step[0]] += 1
            continue
        pairs = {frozenset({a, b}) for a in "abc" for b in "abc" if a < b and waiting[a] and waiting[b]}
        had = {pair: had.get(pair, Counter()) for pair in pairs}
        item = queue.pop()
        if item is None:
            continue
        waiting[item[0]] -= 1
        for pair, counts in had.items():
            counts[item[0]] += item[1]
            a, b = sorted(pair)
            assert abs(counts[a] - counts[b]) <= 100


class Gate:
    """Work that waits in its thread until it is let go."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.has_begun = threading.Event()
        self.open = threading.Event()

    def work(self, name: str) -> str:
        self.begun.append(name)
        self.has_begun.set()
        assert self.open.wait(30)
        return name


@pytest.fixture
async def work() -> AsyncIterator[TextWork]:
    made = TextWork(2)
    yield made
    made.close()


async def test_s3_large_bodies_leave_a_thread_to_small_ones(work: TextWork) -> None:
    gate = Gate()
    flood = [
        asyncio.create_task(work.run("flood", LARGE, lambda i=i: gate.work(f"flood {i}")))  # type: ignore[misc]  # a lambda with a default
        for i in range(8)
    ]
    await asyncio.sleep(0)
    async with asyncio.timeout(20):
        assert await work.run("victim", SMALL_BYTES, lambda: "answered") == "answered"
    assert gate.begun == ["flood 0"]
    gate.open.set()
    assert await asyncio.gather(*flood) == [f"flood {i}" for i in range(8)]


async def test_work_whose_caller_left_keeps_its_thread_until_it_ends_and_its_place_no_longer(work: TextWork) -> None:
    gate = Gate()
    running = asyncio.create_task(work.run("a", LARGE, lambda: gate.work("running")))
    waiting = asyncio.create_task(work.run("a", LARGE, lambda: gate.work("waiting")))
    last = asyncio.create_task(work.run("b", LARGE, lambda: gate.work("last")))
    await asyncio.to_thread(gate.has_begun.wait, 20)
    running.cancel()
    waiting.cancel()
    await asyncio.sleep(0.05)
    assert gate.begun == ["running"]
    assert work.num_waiting == 1
    gate.open.set()
    assert await last == "last"
    assert gate.begun == ["running", "last"]
    assert (work.num_waiting, work.num_waiting_bytes) == (0, 0)


async def test_an_error_of_the_work_is_its_callers_and_frees_its_thread(work: TextWork) -> None:
    for _ in range(5):
        with pytest.raises(ZeroDivisionError):
            await work.run("a", LARGE, lambda: 1 // 0)
    assert await work.run("a", LARGE, lambda: 1) == 1
