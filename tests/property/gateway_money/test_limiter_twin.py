"""The limiter's rule in Python, and the scripts on a real Redis: every answer of every interleaving is the same."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from accounting.types import Limits
from gateway.limits import (
    Holder,
    LeaseGrant,
    Limiter,
    ReservationEnded,
    Verdict,
    Window,
    limiter_link,
)

START_MS = 1_790_000_000_000
LADDER = [(16, 160), (8, 81), (4, 41), (2, 21), (1, 11)]


@dataclass
class TwinWindow:
    seconds: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    newest: int = 0

    def sum(self, now_s: int) -> int:
        return sum(n for s, n in self.seconds.items() if s >= now_s - 60)

    def add(self, second: int, now_s: int, amount: int) -> None:
        if amount and second >= now_s - 60:
            self.seconds[second] += amount
            if amount > 0:
                self.newest = max(self.newest, second)

    def free_in(self, now_ms: int, excess: int) -> int:
        freed = 0
        for second in range(now_ms // 1000 - 60, now_ms // 1000 + 1):
            freed += self.seconds.get(second, 0)
            if freed >= excess:
                return (second + 61) * 1000 - now_ms
        raise AssertionError("more to free than counts")

    def show(self, now_ms: int) -> Window:
        total = self.sum(now_ms // 1000)
        return Window(total, (self.newest + 61) * 1000 - now_ms if total > 0 else 0)


@dataclass
class TwinReservation:
    key: str
    prompt: int
    prompt_s: int
    bound: int
    micro_units: int
    granted: dict[int, int]
    seq: int = 0
    wait: int = 0


class Twin:
    """One tenant."""

    def __init__(self) -> None:
        self.mark = 0
        self.requests: dict[str, TwinWindow] = defaultdict(TwinWindow)
        self.tokens: dict[str, TwinWindow] = defaultdict(TwinWindow)
        self.open: dict[str, TwinReservation] = {}
        self.ended: set[str] = set()

    def reserve(
        self, now: int, who: Holder, prompt: int, cost: int, rungs: list[tuple[int, int]]
    ) -> Verdict | None:
        if who.request_id in self.ended:
            return None
        now = self._clock(now)
        known = self.open.get(who.request_id)
        if known:
            return self._verdict(now, who, known.bound, known.micro_units, 0, 0)
        least = prompt + (rungs[-1][0] if rungs else 0)
        failing, waits = [], []
        levels = ((1, who.key_id, who.key_limits), (4, "t", who.tenant_limits))
        for number, name, limits in levels:
            for offset, window, need, limit in (
                (0, self.requests[name], 1, limits.requests_per_minute),
                (1, self.tokens[name], least, limits.tokens_per_minute),
            ):
                excess = 0 if limit is None else window.sum(now // 1000) + need - limit
                if excess > 0:
                    failing.append(number + offset)
                    waits.append(-1 if need > limit else window.free_in(now, excess))
        for number, name, limits in levels:
            running = sum(name in ("t", entry.key) for entry in self.open.values())
            if limits.concurrency is not None and running >= limits.concurrency:
                failing.append(number + 2)
                waits.append(1000 if limits.concurrency else -1)
        if failing:
            windows = [n for n in failing if n not in (3, 6)]
            named = (windows or failing)[0]
            return self._verdict(now, who, 0, 0, named, -1 if -1 in waits else max(waits))
        bound, lease_cost = self._rung(now, who, rungs, prompt)
        for name in (who.key_id, "t"):
            self.requests[name].add(now // 1000, now // 1000, 1)
            self.tokens[name].add(now // 1000, now // 1000, prompt + bound)
        self.open[who.request_id] = TwinReservation(
            who.key_id, prompt, now // 1000, bound, cost + lease_cost, {now // 1000: bound}
        )
        return self._verdict(now, who, bound, cost + lease_cost, 0, 0)

    def extend(
        self, now: int, who: Holder, seq: int, rungs: list[tuple[int, int]], counted: int
    ) -> LeaseGrant:
        now = self._clock(now)
        entry = self.open[who.request_id]
        if 0 <= counted < entry.prompt:
            for name in (who.key_id, "t"):
                self.tokens[name].add(entry.prompt_s, now // 1000, counted - entry.prompt)
            entry.prompt = counted
        if seq > entry.seq:
            tokens, cost = self._rung(now, who, rungs, 0)
            entry.seq, entry.wait = seq, 0
            if tokens == 0:
                for name, limits in ((who.key_id, who.key_limits), ("t", who.tenant_limits)):
                    if limits.tokens_per_minute is not None:
                        excess = self.tokens[name].sum(now // 1000) + 1 - limits.tokens_per_minute
                        if excess > 0:
                            entry.wait = max(entry.wait, self.tokens[name].free_in(now, excess))
            for name in (who.key_id, "t"):
                self.tokens[name].add(now // 1000, now // 1000, tokens)
            entry.granted[now // 1000] = entry.granted.get(now // 1000, 0) + tokens
            entry.bound += tokens
            entry.micro_units += cost
        return LeaseGrant(entry.bound, entry.wait, entry.micro_units)

    def finish(
        self, now: int, who: Holder, used_prompt: int, used_output: int, *, uncount: bool = False
    ) -> None:
        now = self._clock(now)
        entry = self.open.pop(who.request_id, None)
        if entry is None:
            return
        self.ended.add(who.request_id)
        for name in (entry.key, "t"):
            window = self.tokens[name]
            window.add(entry.prompt_s, now // 1000, -max(0, entry.prompt - used_prompt))
            unspent = max(0, entry.bound - used_output)
            for second in sorted(entry.granted, reverse=True):
                back = min(unspent, entry.granted[second])
                window.add(second, now // 1000, -back)
                unspent -= back
            if uncount:
                self.requests[name].add(entry.prompt_s, now // 1000, -1)

    def _clock(self, now: int) -> int:
        self.mark = max(self.mark, now)
        return self.mark

    def _rung(
        self, now: int, who: Holder, rungs: list[tuple[int, int]], extra: int
    ) -> tuple[int, int]:
        for tokens, cost in rungs:
            if all(
                limit is None or self.tokens[name].sum(now // 1000) + extra + tokens <= limit
                for name, limit in (
                    (who.key_id, who.key_limits.tokens_per_minute), ("t", who.tenant_limits.tokens_per_minute),
                )
            ):  # fmt: skip
                return tokens, cost
        return 0, 0

    def _verdict(
        self, now: int, who: Holder, bound: int, cost: int, failing: int, wait: int
    ) -> Verdict:
        mine = [entry for entry in self.open.values() if entry.key == who.key_id]
        everyone = list(self.open.values())
        return Verdict(
            now, bound, cost, failing, wait,
            self.requests[who.key_id].show(now), self.tokens[who.key_id].show(now),
            self.requests["t"].show(now), self.tokens["t"].show(now),
            len(mine), sum(e.prompt + e.bound for e in mine),
            len(everyone), sum(e.prompt + e.bound for e in everyone),
        )  # fmt: skip


limit = st.none() | st.integers(0, 12)
token_limit = st.none() | st.integers(1, 120)
limits = st.builds(Limits, limit, token_limit, st.none() | st.integers(0, 5))
numbers = st.integers(0, 5)


def machine(url: str) -> type[RuleBasedStateMachine]:
    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.runner = asyncio.Runner()
            self.now = START_MS
            self.twin = Twin()
            self.admitted: list[int] = []
            self.runner.run(self.connect())

        async def connect(self) -> None:
            self.link = limiter_link(url, timeout_s=5)
            await self.link.command("FLUSHDB")
            self.limiter = Limiter(self.link, 0, now_ms=lambda: self.now)

        def teardown(self) -> None:
            self.runner.run(self.link.close())
            self.runner.close()

        @initialize(tenant=limits, keys=st.lists(limits, min_size=2, max_size=2))
        def limit(self, tenant: Limits, keys: list[Limits]) -> None:
            self.tenant_limits, self.key_limits = tenant, keys

        def holder(self, number: int) -> Holder:
            key = number % 2
            return Holder(
                f"req_{number}", "T", f"key_{key}", self.key_limits[key], self.tenant_limits
            )

        def fresh(self) -> int:
            taken = len(self.twin.open) + len(self.twin.ended)
            return next(n for n in range(taken, taken + 1000) if self.unused(n))

        def unused(self, number: int) -> bool:
            request_id = f"req_{number}"
            return request_id not in self.twin.open and request_id not in self.twin.ended

        def opened(self, number: int) -> Holder:
            request_id = sorted(self.twin.open)[number % len(self.twin.open)]
            return self.holder(int(request_id.removeprefix("req_")))

        def reserve(self, who: Holder, prompt: int, rungs: list[tuple[int, int]]) -> Verdict | None:
            before = len(self.twin.open)
            expected = self.twin.reserve(self.now, who, prompt, prompt * 7, rungs)
            try:
                found = self.runner.run(self.limiter.reserve(who, prompt, prompt * 7, rungs))
            except ReservationEnded:
                found = None
            assert found == expected
            if len(self.twin.open) > before:
                self.admitted.append(self.twin.mark)
            return found

        @rule(milliseconds=st.sampled_from([-700, 1, 400, 1000, 7_000, 30_000, 61_000]))
        def pass_time(self, milliseconds: int) -> None:
            self.now += milliseconds

        @rule(
            skip=st.integers(0, 1), prompt=st.integers(0, 40), outputs=st.integers(0, len(LADDER))
        )
        def admit(self, skip: int, prompt: int, outputs: int) -> None:
            self.reserve(self.holder(self.fresh() + skip), prompt, LADDER[outputs:])

        @precondition(lambda self: self.twin.open)
        @rule(number=numbers)
        def admit_again(self, number: int) -> None:
            self.reserve(self.opened(number), 3, LADDER)

        @precondition(lambda self: self.twin.ended)
        @rule()
        def admit_after_the_end(self) -> None:
            ended = min(self.twin.ended)
            assert self.reserve(self.holder(int(ended.removeprefix("req_"))), 3, LADDER) is None

        @rule(prompt=st.integers(0, 20))
        def a_client_that_waits_as_told_is_admitted(self, prompt: int) -> None:
            verdict = self.reserve(self.holder(self.fresh()), prompt, LADDER)
            if verdict is not None and verdict.failing and verdict.wait_ms > 0:
                self.now = self.twin.mark + verdict.wait_ms
                again = self.reserve(self.holder(self.fresh()), prompt, LADDER)
                assert again is not None
                assert again.failing in (0, 3, 6)  # nobody knows when a running request ends

        @precondition(lambda self: self.twin.open)
        @rule(
            number=numbers,
            step=st.integers(0, 1),
            counted=st.integers(-1, 40),
            rungs=st.integers(0, 4),
        )
        def extend(self, number: int, step: int, counted: int, rungs: int) -> None:
            who = self.opened(number)
            seq = self.twin.open[who.request_id].seq + step
            expected = self.twin.extend(self.now, who, seq, LADDER[rungs:], counted)
            assert (
                self.runner.run(self.limiter.extend(who, seq, LADDER[rungs:], counted)) == expected
            )

        @precondition(lambda self: self.twin.open)
        @rule(
            number=numbers,
            used=st.integers(0, 40),
            output=st.integers(0, 40),
            times=st.integers(1, 2),
        )
        def settle(self, number: int, used: int, output: int, times: int) -> None:
            who = self.opened(number)
            for _ in range(times):
                self.twin.finish(self.now, who, used, output)
                self.runner.run(self.limiter.settle(who, 1, used, output))

        @precondition(lambda self: self.twin.open)
        @rule(number=numbers, never=st.booleans(), times=st.integers(1, 2))
        def release(self, number: int, never: bool, times: int) -> None:
            who = self.opened(number)
            if never and self.twin.mark // 1000 - self.twin.open[who.request_id].prompt_s <= 60:
                self.admitted.remove(
                    next(
                        t
                        for t in self.admitted
                        if t // 1000 == self.twin.open[who.request_id].prompt_s
                    )
                )
            for _ in range(times):
                self.twin.finish(self.now, who, 0, 0, uncount=never)
                self.runner.run(self.limiter.release(who, never_admitted=never))

        @rule()
        def release_before_the_reserve_arrives(self) -> None:
            who = self.holder(self.fresh())
            self.runner.run(self.limiter.release(who))
            if self.twin.mark:  # without a tenant's state there is nothing to keep the tombstone in
                self.twin._clock(self.now)
                self.twin.ended.add(who.request_id)
                assert self.reserve(who, 1, LADDER) is None

        def check_sliding_window(self) -> None:
            """Independent of buckets: no 60 s hold more admissions than the tenant's limit."""
            allowed = self.tenant_limits.requests_per_minute
            if allowed is not None:
                for end in self.admitted:
                    assert sum(end - 60_000 < t <= end for t in self.admitted) <= allowed

        @rule()
        def nothing_exceeds_its_limit(self) -> None:
            self.check_sliding_window()
            assert self.limiter.num_held == len(self.twin.open)
            assert self.limiter.num_owed == 0

    return Machine


@pytest.mark.timeout(120)
def test_the_scripts_are_the_rule(redis_url: str) -> None:
    run_state_machine_as_test(
        machine(redis_url),
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            phases=[Phase.explicit, Phase.generate],  # shrinking against a server outlasts reading
            suppress_health_check=list(HealthCheck),
        ),
    )
