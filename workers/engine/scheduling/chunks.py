"""Distribution of a step's tokens over prompts: tenant by tenant, then in equal shares. The module is pure.

It knows recent service, leases and budgets. Admission has already decided which prompts are in prefill.
"""

from __future__ import annotations

import math

from workers.engine.queueing.fairness import RecentService, VirtualCounters
from workers.engine.queueing.pace import TokenBudget
from workers.engine.scheduling.sequence_queues import TIERS, SequenceQueues
from workers.engine.scheduling.step_plan import StepPlan, Work
from workers.engine.sequences.sequence import Sequence
from workers.protocol.messages import Tier

HEAVY = 8
"""A tenant that lately got more than this many times what another tenant got whose prompt is in the same step, or may
come during it, receives only a part of the step."""


class Chunks:
    def __init__(self, ranks: SequenceQueues, counters: VirtualCounters, budget: TokenBudget) -> None:
        self._ranks = ranks
        self._counters = counters
        self._token_budget = budget
        self._recent = {tier: RecentService() for tier in TIERS}

    def deal(self, plan: StepPlan, tier: Tier, prefills: list[Sequence]) -> None:
        """Deals tokens to the tenants of a tier one after the other, the tenant that recently got least first. Inside a
        tenant the budget is divided into equal shares, and what a short prompt leaves over goes to the longer ones."""
        tenants: dict[str, list[Sequence]] = {}
        for sequence in sorted(prefills, key=_turn):
            tenants.setdefault(sequence.attempt.message.tenant, []).append(sequence)
        services, light = self._recent[tier], math.inf
        awaited = self._recent["interactive"].lightest(plan.now)
        for tenant in sorted(tenants, key=lambda t: services.of(t, plan.now)):
            recent = services.of(tenant, plan.now)
            if recent > HEAVY * light:
                plan.fill_up(self._token_budget.num_short)
            elif awaited < (recent / HEAVY if tier == "interactive" else math.inf):
                plan.expect_arrival(self._token_budget.num_short)
            before = plan.budget
            self._deal_shares(plan, tenants[tenant])
            weight = self._counters.weight(tenant)
            services.add(tenant, (before - plan.budget) / weight, plan.now)
            light = min(light, services.of(tenant, plan.now))

    def next_whole(self, plan: StepPlan, tier: Tier) -> int:
        """Returns the number of tokens of the running input of a tier that is dealt to first, if inputs are computed in
        one step, else 0."""
        services = self._recent[tier]
        whole = [s for s in self._ranks.running[tier] if s.attempt.is_whole and not plan.excludes(s)]
        waiting = [sequence for sequence in whole if sequence.num_unscheduled]
        if not waiting:
            return 0
        first = min(waiting, key=lambda s: (services.of(s.attempt.message.tenant, plan.now), s.order))
        return first.num_unscheduled

    def _deal_shares(self, plan: StepPlan, prefills: list[Sequence]) -> None:
        for position, sequence in enumerate(prefills):
            if plan.budget == 0:
                return
            if sequence.attempt.is_whole:
                self._deal_whole(plan, sequence)
                continue
            share = max(1, plan.budget // (len(prefills) - position))
            self._deal_at_most(plan, sequence, share)

    def _deal_whole(self, plan: StepPlan, sequence: Sequence) -> None:
        """Deals an input that is computed in one step. One that is larger than the budget has the step for itself."""
        num_tokens = sequence.num_unscheduled
        if plan.work and num_tokens > plan.budget:
            return
        plan.budget = max(plan.budget, num_tokens)
        self._deal_chunk(plan, Work(sequence, num_tokens, 0))

    def _deal_at_most(self, plan: StepPlan, sequence: Sequence, share: int) -> None:
        num_tokens = plan.stretch(share, sequence.num_unscheduled)
        num_draws = 0
        if num_tokens == sequence.num_unscheduled and sequence.in_gang:
            num_tokens -= 1  # the last token waits for the rest of the gang
            if num_tokens == 0:
                return
        elif num_tokens == sequence.num_unscheduled:
            num_draws = self._draws_within_lease(sequence)
            if num_draws < 0:
                num_tokens -= 1  # the last token waits for the lease: its logits are wanted
        if num_tokens == 0:
            self._ranks.park(sequence.attempt, plan.now, plan.step)
            return
        self._deal_chunk(plan, Work(sequence, num_tokens, max(0, num_draws)))

    def _deal_chunk(self, plan: StepPlan, work: Work) -> None:
        sequence, num_tokens, num_draws = work
        attempt = sequence.attempt
        forks = num_draws > 0 and (len(attempt.unforked) > 1 or attempt.gang)
        needed = num_draws > 0 and attempt.needs_last_token
        sums = attempt.inputs is not None and not attempt.inputs.reuses_kv
        if forks or needed or sums or attempt.wants_prompt_logprobs:
            plan.holds_next = True
        if num_draws and attempt.unforked and not (forks or attempt.wants_prompt_logprobs):
            sequence.take_index(attempt.take_unforked(1)[0])
        attempt.lease.in_flight += num_draws
        plan.budget -= num_tokens
        plan.work.append(work)

    def _draws_within_lease(self, sequence: Sequence) -> int:
        """Returns the number of draws at the end of a prefill, or -1 if the lease has to grow before."""
        lease = sequence.attempt.lease
        if lease.left >= sequence.num_draws:
            return sequence.num_draws
        if lease.left < lease.stride:
            return -1
        return lease.left if lease.last else -1


def _turn(sequence: Sequence) -> tuple[int, ...]:
    """Returns the place of a prompt among its tenant's: short ones first. Those that are computed in one step keep the
    order of their arrival, because a long one that must be alone would be passed over for ever."""
    return sequence.order if sequence.attempt.is_whole else (sequence.num_unscheduled,)
