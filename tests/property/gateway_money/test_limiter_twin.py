"""The limiter's rule in Python, and the scripts on a real Redis: every answer of every interleaving is the same."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from migrated import migrated

from accounting.database.db import Database
from accounting.values.budget_types import Budget
from accounting.values.types import Limits, Principal
from gateway.limiter.limits import LeaseGrant, Limiter, Money, ReservationEnded, Verdict, Window, limiter_link
from gateway.limiter.rules import BudgetUse, LimitSubject, Rule

START_MS = 1_790_000_000_000
OPENED_MS = START_MS + 100_000_000
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

    def show(self, now_ms: int, open_tokens: int) -> Window:
        total = self.sum(now_ms // 1000)
        empty_in = (self.newest + 61) * 1000 - now_ms if total > 0 else 0
        return Window(total, empty_in, open_tokens)


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
    stop: BudgetUse | None = None


class Twin:
    """One tenant."""

    def __init__(self) -> None:
        self.mark = 0
        self.requests: dict[str, TwinWindow] = defaultdict(TwinWindow)
        self.tokens: dict[str, TwinWindow] = defaultdict(TwinWindow)
        self.open: dict[str, TwinReservation] = {}
        self.ended: set[str] = set()
        self.used = 0

    @property
    def held(self) -> int:
        return sum(entry.micro_units for entry in self.open.values())

    def left(self, use: BudgetUse) -> int:
        return use.budget.limit_micro_units - self.used - self.held

    def reserve(
        self, now: int, who: LimitSubject, prompt: int, cost: int, rungs: list[tuple[int, int]]
    ) -> Verdict | None:
        if who.request_id in self.ended:
            return None
        now = self._clock(now)
        known = self.open.get(who.request_id)
        if known:
            return self._verdict(now, who, known.bound, known.micro_units, None, 0)
        smallest = rungs[-1] if rungs else (0, 0)
        failing: list[Rule | BudgetUse] = []
        waits = []
        for binding in who.window_rules:
            need = 1 if binding.dimension == "requests_per_minute" else prompt + smallest[0]
            window = self._window(binding.window)
            excess = window.sum(now // 1000) + need - binding.limit
            if excess > 0:
                failing.append(binding)
                waits.append(-1 if need > binding.limit else window.free_in(now, excess))
        for binding in who.running_rules:
            if self._running(binding) >= binding.limit:
                failing.append(binding)
                waits.append(1000 if binding.limit else -1)
        for use in who.budgets:
            if use.budget.hardness == "hard" and cost + smallest[1] > self.left(use):
                failing.append(use)
                waits.append(-1)
        if failing:
            return self._verdict(now, who, 0, 0, failing[0], -1 if -1 in waits else max(waits))
        bound, lease_cost = self._rung(now, who, rungs, prompt, cost)
        for name in (who.key_id, "t"):
            self.requests[name].add(now // 1000, now // 1000, 1)
            self.tokens[name].add(now // 1000, now // 1000, prompt + bound)
        self.open[who.request_id] = TwinReservation(
            who.key_id, prompt, now // 1000, bound, cost + lease_cost, {now // 1000: bound}
        )
        return self._verdict(now, who, bound, cost + lease_cost, None, 0)

    def extend(self, now: int, who: LimitSubject, seq: int, rungs: list[tuple[int, int]], counted: int) -> LeaseGrant:
        now = self._clock(now)
        entry = self.open[who.request_id]
        if 0 <= counted < entry.prompt:
            for name in (who.key_id, "t"):
                self.tokens[name].add(entry.prompt_s, now // 1000, counted - entry.prompt)
            entry.prompt = counted
        if seq > entry.seq:
            tokens, cost = self._rung(now, who, rungs, 0, 0)
            entry.seq, entry.wait, entry.stop = seq, 0, None
            if tokens == 0:
                for binding in who.window_rules:
                    window = self._window(binding.window)
                    excess = window.sum(now // 1000) + 1 - binding.limit
                    if binding.dimension == "tokens_per_minute" and excess > 0:
                        entry.wait = max(entry.wait, window.free_in(now, excess))
                unpaid = (u for u in who.budgets if u.budget.hardness == "hard")
                entry.stop = next((u for u in unpaid if rungs[-1][1] > self.left(u)), None)
            for name in (who.key_id, "t"):
                self.tokens[name].add(now // 1000, now // 1000, tokens)
            entry.granted[now // 1000] = entry.granted.get(now // 1000, 0) + tokens
            entry.bound += tokens
            entry.micro_units += cost
        return LeaseGrant(entry.bound, entry.wait, entry.micro_units, entry.stop)

    def finish(
        self, now: int, who: LimitSubject, used_prompt: int, used_output: int, cost: int = 0, *, uncount: bool = False
    ) -> None:
        now = self._clock(now)
        entry = self.open.pop(who.request_id, None)
        if entry is None:
            return
        self.ended.add(who.request_id)
        self.used += cost
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
        self, now: int, who: LimitSubject, rungs: list[tuple[int, int]], extra: int, cost: int
    ) -> tuple[int, int]:
        for tokens, rung_cost in rungs:
            fits = all(
                self._window(binding.window).sum(now // 1000) + extra + tokens <= binding.limit
                for binding in who.window_rules
                if binding.dimension == "tokens_per_minute"
            )
            paid = all(cost + rung_cost <= self.left(use) for use in who.budgets if use.budget.hardness == "hard")
            if fits and paid:
                return tokens, rung_cost
        return 0, 0

    def _window(self, name: str) -> TwinWindow:
        place, unit, _ = name.rsplit(":", 2)
        return (self.requests if unit == "requests" else self.tokens)[place]

    def _at(self, place: str) -> list[TwinReservation]:
        return [entry for entry in self.open.values() if place in ("t", entry.key)]

    def _running(self, binding: Rule) -> int:
        return len(self._at(binding.place))

    def _verdict(
        self, now: int, who: LimitSubject, bound: int, cost: int, failing: Rule | BudgetUse | None, wait: int
    ) -> Verdict:
        windows = {}
        for name in who.windows:
            open_tokens = sum(e.prompt + e.bound for e in self._at(name.rsplit(":", 2)[0]))
            windows[name] = self._window(name).show(now, open_tokens)
        running = {binding: self._running(binding) for binding in who.running_rules}
        money = {use.row: Money(self.used, self.held) for use in who.budgets}
        return Verdict(now, bound, cost, failing, wait, windows, running, money)


limit = st.none() | st.integers(0, 12)
token_limit = st.none() | st.integers(1, 120)
limits = st.builds(Limits, limit, token_limit, st.none() | st.integers(0, 5))
numbers = st.integers(0, 5)


async def nothing_to_ship() -> None:
    return None


def machine(url: str, database_url: str) -> type[RuleBasedStateMachine]:
    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.runner = asyncio.Runner()
            self.now = START_MS
            self.twin = Twin()
            self.admitted: list[int] = []
            self.runner.run(self.connect())

        async def connect(self) -> None:
            self.link = limiter_link(url, timeout_s=30)
            await self.link.command("FLUSHDB")
            self.database = Database(database_url)
            self.limiter = Limiter(self.link, 0, self.database, caught_up=nothing_to_ship, now_ms=lambda: self.now)

        def teardown(self) -> None:
            self.runner.run(self.limiter.rebuilder.leave())
            self.runner.run(self.link.close())
            self.runner.run(self.database.close())
            self.runner.close()

        @initialize(
            tenant=limits,
            keys=st.lists(limits, min_size=2, max_size=2),
            money=st.lists(st.integers(0, 1500), max_size=2),
        )
        def limit(self, tenant: Limits, keys: list[Limits], money: list[int]) -> None:
            self.tenant_limits, self.key_limits = tenant, keys
            self.budgets = tuple(
                Budget(
                    id=f"budget_{n}",
                    tenant_id="T",
                    period="fixed",
                    start_ms=OPENED_MS,
                    end_ms=OPENED_MS * 2,
                    limit_micro_units=amount,
                    hardness="hard" if n == 0 else "soft",
                )
                for n, amount in enumerate(money)
            )

        def holder(self, number: int) -> LimitSubject:
            key = number % 2
            principal = Principal(
                "tenant",
                "T",
                f"key_{key}",
                frozenset(),
                tenant_limits=self.tenant_limits,
                key_limits=self.key_limits[key],
                model_limits=(("m", Limits()),),
                budgets=self.budgets,
            )
            return LimitSubject.of(f"req_{number}", principal, "m", "interactive", now_ms=OPENED_MS)

        def fresh(self) -> int:
            taken = len(self.twin.open) + len(self.twin.ended)
            return next(n for n in range(taken, taken + 1000) if self.unused(n))

        def unused(self, number: int) -> bool:
            request_id = f"req_{number}"
            return request_id not in self.twin.open and request_id not in self.twin.ended

        def opened(self, number: int) -> LimitSubject:
            request_id = sorted(self.twin.open)[number % len(self.twin.open)]
            return self.holder(int(request_id.removeprefix("req_")))

        def reserve(self, who: LimitSubject, prompt: int, rungs: list[tuple[int, int]]) -> Verdict | None:
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
            """Small steps back; one above a minute is another clock (test_clock_steps.py)."""
            self.now = max(self.now + milliseconds, self.twin.mark - 60_000)

        @rule(skip=st.integers(0, 1), prompt=st.integers(0, 40), outputs=st.integers(0, len(LADDER)))
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
            if verdict is not None and verdict.failing is not None and verdict.wait_ms > 0:
                self.now = self.twin.mark + verdict.wait_ms
                again = self.reserve(self.holder(self.fresh()), prompt, LADDER)
                assert again is not None
                # nobody knows when a running request ends
                assert again.failing is None or again.failing.dimension == "concurrency"

        @precondition(lambda self: self.twin.open)
        @rule(number=numbers, step=st.integers(0, 1), counted=st.integers(-1, 40), rungs=st.integers(0, 4))
        def extend(self, number: int, step: int, counted: int, rungs: int) -> None:
            who = self.opened(number)
            seq = self.twin.open[who.request_id].seq + step
            expected = self.twin.extend(self.now, who, seq, LADDER[rungs:], counted)
            extending = self.limiter.extend(who, seq, LADDER[rungs:], OPENED_MS, counted)
            assert self.runner.run(extending) == expected

        @precondition(lambda self: self.twin.open)
        @rule(number=numbers, used=st.integers(0, 40), output=st.integers(0, 40), times=st.integers(1, 2))
        def settle(self, number: int, used: int, output: int, times: int) -> None:
            who = self.opened(number)
            cost = min(used * 7 + output, self.twin.open[who.request_id].micro_units)
            for _ in range(times):
                self.twin.finish(self.now, who, used, output, cost)
                self.runner.run(self.limiter.settle(who, cost, used, output))

        @precondition(lambda self: self.twin.open)
        @rule(number=numbers, never=st.booleans(), times=st.integers(1, 2))
        def release(self, number: int, never: bool, times: int) -> None:
            who = self.opened(number)
            if never and self.twin.mark // 1000 - self.twin.open[who.request_id].prompt_s <= 60:
                self.admitted.remove(
                    next(t for t in self.admitted if t // 1000 == self.twin.open[who.request_id].prompt_s)
                )
            for _ in range(times):
                self.twin.finish(self.now, who, 0, 0, uncount=never)
                self.runner.run(self.limiter.release(who, never_admitted=never))

        @rule()
        def release_before_the_reserve_arrives(self) -> None:
            who = self.holder(self.fresh())
            self.runner.run(self.limiter.release(who))
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
            for use in self.holder(0).budgets:
                assert self.twin.left(use) >= 0 or use.budget.hardness == "soft"
            assert self.limiter.num_held == len(self.twin.open)
            assert self.limiter.num_owed == 0

    return Machine


@pytest.mark.timeout(120)
@pytest.mark.parametrize("num_examples", [25, pytest.param(100, marks=pytest.mark.slow)])
def test_the_scripts_are_the_rule(redis_url: str, tmp_path: Path, num_examples: int) -> None:
    database_url = f"sqlite+aiosqlite:///{tmp_path / 'headgate.db'}"
    migrated(database_url)
    run_state_machine_as_test(
        machine(redis_url, database_url),
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=40,
            deadline=None,
            phases=[Phase.explicit, Phase.generate],  # shrinking against a server outlasts reading
            suppress_health_check=list(HealthCheck),
        ),
    )
