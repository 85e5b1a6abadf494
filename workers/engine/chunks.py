"""Whose prompt gets how much of a step's tokens: tenant by tenant, then in equal shares. Pure.

Knows recent service, leases and budgets; who is in prefill at all was decided at admission.
"""

from __future__ import annotations

import math

from workers.engine.fairness import RecentService, VirtualCounters
from workers.engine.ranks import Ranks
from workers.engine.sequence import Sequence
from workers.engine.step_plan import StepPlan, Work

HEAVY = 8
"""Times the recent service of a tenant whose prompt is in the same step: what comes behind it is kept short."""


class Chunks:
    def __init__(self, ranks: Ranks, counters: VirtualCounters) -> None:
        self._ranks = ranks
        self._counters = counters
        self._recent = RecentService()

    def deal(self, plan: StepPlan, prefills: list[Sequence]) -> None:
        """Tenants one after the other, who got least of late first; inside a tenant equal shares of the budget, and
        what a short prompt leaves over goes to the longer ones."""
        tenants: dict[str, list[Sequence]] = {}
        for sequence in sorted(prefills, key=lambda s: s.num_unscheduled):
            tenants.setdefault(sequence.attempt.message.tenant, []).append(sequence)
        light = math.inf
        for tenant in sorted(tenants, key=lambda t: self._recent.of(t, plan.now)):
            if self._recent.of(tenant, plan.now) > HEAVY * light:
                plan.keep_short()
            before = plan.budget
            self._deal_shares(plan, tenants[tenant])
            weight = self._counters.weight(tenant)
            self._recent.add(tenant, (before - plan.budget) / weight, plan.now)
            light = min(light, self._recent.of(tenant, plan.now))

    def _deal_shares(self, plan: StepPlan, prefills: list[Sequence]) -> None:
        for position, sequence in enumerate(prefills):
            if plan.budget == 0:
                return
            share = max(1, plan.budget // (len(prefills) - position))
            num_tokens = min(sequence.num_unscheduled, share)
            num_draws = 0
            if num_tokens == sequence.num_unscheduled:
                num_draws = self._draws_within_lease(sequence)
                if num_draws < 0:
                    num_tokens -= 1  # the last token waits for the lease: its logits are wanted
            if num_tokens == 0:
                self._ranks.park(sequence.attempt, plan.now, plan.step)
                continue
            self._deal_chunk(plan, Work(sequence, num_tokens, max(0, num_draws)))

    def _deal_chunk(self, plan: StepPlan, work: Work) -> None:
        sequence, num_tokens, num_draws = work
        attempt = sequence.attempt
        forks = num_draws > 0 and len(attempt.unforked) > 1
        masked = num_draws > 0 and attempt.grammar is not None  # the next mask needs this token
        if forks or masked or attempt.wants_prompt_logprobs:
            plan.holds_next = True
        if num_draws and attempt.unforked and not (forks or attempt.wants_prompt_logprobs):
            sequence.take_index(attempt.take_unforked(1)[0])
        attempt.lease.in_flight += num_draws
        plan.budget -= num_tokens
        plan.work.append(work)

    def _draws_within_lease(self, sequence: Sequence) -> int:
        """Draws at the end of a prefill; -1: the lease has to grow before."""
        lease = sequence.attempt.lease
        if lease.left >= sequence.num_draws:
            return sequence.num_draws
        return lease.left if lease.last and lease.left > 0 else -1
