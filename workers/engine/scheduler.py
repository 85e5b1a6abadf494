"""Who computes what in the next step. Pure: values in, a plan out; the cache is its one partner.

Of each tier, interactive before batch, a plan takes decodes first (one token each), then admits what fits, then deals
the rest of the token budget over all prefills in equal shares. Blocks for a whole uncached prompt are taken at
admission, those for output one by one; when one is missing, the latest arrival loses its own (recompute: what it had
committed stays in the tree).

A step is counted twice. `launched` moves what the next plan builds on: positions scheduled, draws pending. `advance`
moves what is known: positions computed, tokens in the tree. A plan may be made ahead, with a step in flight whose
tokens are unknown: whatever length, lease and context bound is known all the same, only an end token is not, and then
one row too many is dropped (`drop`). What a failed step did is taken back by `retract`.

Why it cannot deadlock: a sequence that runs alone always fits, because `Limits.max_len` is at most what the pool holds
beside its pins; the earliest sequence of a tier is never preempted for a later one; nothing of a tier is admitted while
a preempted one waits; and a plan that lacks blocks while a step is in flight is made again when that one is collected.
"""

from __future__ import annotations

from cache.prefix_cache import PrefixCache
from workers.engine.admission import Admission
from workers.engine.fairness import VirtualCounters
from workers.engine.holdings import Holdings
from workers.engine.ranks import TIERS, Ranks
from workers.engine.record import StepRecord
from workers.engine.sequence import Attempt, Sequence, Status
from workers.engine.speculate.speculation import Speculation
from workers.engine.step_plan import Limits, StepPlan, TokenBudget, Work
from workers.protocol.messages import ExtendLease, Tier


class Scheduler:
    def __init__(self, cache: PrefixCache, limits: Limits) -> None:
        self.cache = cache
        self.limits = limits
        self.counters = VirtualCounters()
        self.holdings = Holdings(cache, limits.max_running)
        self.ranks = Ranks(self.holdings, self.counters)
        self.admission = Admission(self.ranks, self.holdings, self.counters, limits)
        self.budget = TokenBudget(limits.max_batch_tokens)
        self.speculation: Speculation | None = None
        self._num_preempted_before = 0
        self._num_cached_before = 0

    # --- attempts come, hear from their gateway, go ---

    def add(self, attempt: Attempt) -> None:
        self.counters.enter(attempt.message.tenant, attempt.message.weight)
        for sequence in attempt.sequences:
            self.ranks.add(sequence)

    def extend(self, attempt: Attempt, message: ExtendLease, now: float) -> None:
        self.ranks.extend(attempt, message, now)

    def end(self, sequence: Sequence) -> None:
        self.ranks.end(sequence)

    def leave(self, attempt: Attempt) -> None:
        """After the last of its sequences ended."""
        self.ranks.leave(attempt)
        self.counters.leave(attempt.message.tenant)

    def expire(self, now: float) -> list[Attempt]:
        """Parked attempts to be ended, because nobody spoke to them for too long."""
        return self.ranks.expire(now, self.limits)

    # --- the plan of a step ---

    def plan(self, step: int, now: float, *, ahead: bool = False) -> StepPlan:
        """Between a plan and its `launched` nothing else may touch the scheduler."""
        self.admission.tick(now)
        plan = StepPlan(
            step,
            now,
            self.budget.num_tokens,
            ahead,
            num_preempted=self._num_preempted_before,
            num_cached_tokens=self._num_cached_before,
        )
        self._num_preempted_before = self._num_cached_before = 0
        for tier in TIERS:
            prefills = self._plan_decodes(plan, tier)
            if tier == "interactive" or not self.ranks.wanted("interactive"):
                self.admission.admit(plan, tier, prefills)
            self._plan_chunks(plan, prefills)
        if self.speculation is not None:
            self.speculation.extend(plan)
        return plan

    def _plan_decodes(self, plan: StepPlan, tier: Tier) -> list[Sequence]:
        """Returns the running ones that are in prefill."""
        block_size = self.cache.block_size
        prefills: list[Sequence] = []
        for sequence in tuple(self.ranks.running[tier]):
            if sequence.status is not Status.RUNNING:
                continue  # preempted for an earlier one, a moment ago
            position, pending = sequence.num_scheduled, sequence.num_pending
            num_left = len(sequence.tokens) + pending - position
            if num_left != 1 or not (pending or sequence.output):
                if num_left:
                    prefills.append(sequence)
                continue
            attempt = sequence.attempt
            if pending and position + 1 >= attempt.end_len:
                continue  # whatever the pending token is, nothing follows it
            lease = attempt.lease
            if lease.bound - lease.spent - lease.in_flight <= 0:
                self.ranks.park(attempt, plan.now, plan.step)
                continue
            if plan.budget == 0:
                break
            forked = len(attempt.sequences) > 1
            if forked and plan.ahead and self._ends_decide_turns(attempt):
                continue
            index = position // block_size
            if (
                index == len(sequence.block_ids)
                or (forked and self.holdings.shares(sequence, index))
            ) and not self._take_block(sequence, index, plan):
                continue
            lease.in_flight += 1
            plan.budget -= 1
            plan.work.append(Work(sequence, 1, 1))
        return [s for s in prefills if s.status is Status.RUNNING]

    def _ends_decide_turns(self, attempt: Attempt) -> bool:
        """Fewer tokens are left than choices run, so the lowest indices go first; which these are is known when the
        step in flight has shown who ended."""
        lease = attempt.lease
        num_pending = sum(s.num_pending for s in attempt.sequences)
        num_running = sum(s.status is Status.RUNNING for s in attempt.sequences)
        return num_pending > 0 and lease.bound - lease.spent - num_pending < num_running

    def _take_block(self, sequence: Sequence, index: int, plan: StepPlan) -> bool:
        """A block of its own to write to: a further one, or a copy of a tail that choices share. False if there is none
        for now, or the sequence was preempted for want of it."""
        while (fresh := self.cache.allocate(1)) is None:
            if plan.ahead:
                plan.holds_next = True
                return False
            victim = self._victim(sequence)
            self.ranks.preempt(victim, plan.now, plan)
            if victim is sequence:
                return False
        copy = self.holdings.put(sequence, index, fresh[0])
        if copy is not None:
            plan.copies.append(copy)
        return True

    def _victim(self, sequence: Sequence) -> Sequence:
        """Batch before interactive, the latest arrival, its last choice; at the worst the one that asks.

        It is never planned yet: a tier's decodes are planned in order of arrival, batch after interactive.
        """
        running = self.ranks.running
        return (running["batch"] or running[sequence.attempt.message.tier])[-1]

    def _plan_chunks(self, plan: StepPlan, prefills: list[Sequence]) -> None:
        """Equal shares of the budget; what a short prompt leaves over goes to the longer ones."""
        prefills.sort(key=lambda s: s.num_unscheduled)
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
                self.ranks.park(sequence.attempt, plan.now, plan.step)
                continue
            self._deal_chunk(plan, Work(sequence, num_tokens, max(0, num_draws)))

    def _deal_chunk(self, plan: StepPlan, work: Work) -> None:
        sequence, num_tokens, num_draws = work
        attempt = sequence.attempt
        forks = num_draws > 0 and len(attempt.unforked) > 1
        if forks or attempt.wants_prompt_logprobs:
            plan.holds_next = True
        elif num_draws and attempt.unforked:
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

    # --- the step goes to the device, and comes back ---

    def launched(self, plan: StepPlan) -> None:
        """From here on the next step may be planned."""
        self.holdings.launched(plan.step)
        for sequence, num_tokens, num_draws in plan.work:
            sequence.num_scheduled += num_tokens
            sequence.num_pending += num_draws
            sequence.last_step = plan.step

    def advance(self, work: Work, record: StepRecord) -> int:
        """KV of `work` is written: count it, and publish the blocks it filled. Returns the tokens that were prefill."""
        sequence, num_tokens, num_draws = work
        start = sequence.num_computed
        end = sequence.num_computed = start + num_tokens
        sequence.num_pending -= num_draws
        # The token drawn last counts as decode; all else is prefill, be it prompt or what was lost.
        num_prefill = (
            num_tokens - 1 if sequence.output and end == len(sequence.tokens) else num_tokens
        )
        if num_prefill < num_tokens:
            record.num_decode_seqs += 1
        if num_prefill:
            attempt = sequence.attempt
            num_fresh = attempt.account.compute(start, start + num_prefill)
            attempt.num_recomputed += num_prefill - num_fresh
            record.num_prefill_tokens += num_prefill
            record.num_recomputed += num_prefill - num_fresh
            self.counters.charge(attempt.message.tenant, computed=num_fresh)
        if end // self.cache.block_size > sequence.num_offered_blocks:
            self.holdings.publish(sequence)
        return num_prefill

    def fork(self, sequence: Sequence, indices: list[int]) -> list[Sequence]:
        """The choices that continue from a finished prefill, the carrier itself first."""
        # Draws may have moved the carrier behind others of its attempt, never behind another arrival.
        sequence.take_index(indices[0])
        children = []
        for index in indices[1:]:
            child = self.holdings.fork(sequence, index)
            sequence.attempt.sequences.append(child)
            self.ranks.run(child)
            children.append(child)
        return [sequence, *children]

    def reject(self, work: Work, num_kept: int) -> None:
        """Of a row with proposals only the first `num_kept` tokens count. What it wrote behind them is written again
        before anybody reads it."""
        sequence, num_lost = work.sequence, work.num_draws - num_kept
        sequence.num_scheduled -= num_lost
        sequence.num_pending -= num_lost
        sequence.attempt.lease.in_flight -= num_lost

    def drop(self, work: Work, record: StepRecord) -> None:
        """The result of a row that nobody wants any more: neither billed nor charged."""
        self.retract(work)
        record.num_lag_discarded += work.num_tokens

    def retract(self, work: Work) -> None:
        """The step does not count for this row: nothing was computed, nothing drawn."""
        sequence = work.sequence
        sequence.num_pending -= work.num_draws
        sequence.attempt.lease.in_flight -= work.num_draws
        sequence.num_scheduled = sequence.num_computed

    def collected(self, step: int) -> None:
        """Behind its last `advance`, `drop` or `retract`: what it used may be used again."""
        self.holdings.collected(step)

    # --- a step that was too large for the device ---

    def shrink(self, plan: StepPlan, live: list[Work]) -> Sequence | None:
        """Smaller steps for a while, and the latest arrivals of this one out of the way, batch first. `live`: its rows
        that somebody still wants. Returns the sequence that cannot run at all: one token of it was too much."""
        num_tokens = sum(work.num_tokens for work in plan.work)
        self.budget.cut(num_tokens)
        self._num_preempted_before += plan.num_preempted
        self._num_cached_before += plan.num_cached_tokens
        if num_tokens == 1:
            return live[0].sequence
        left = [work for work in live if work.sequence.status is Status.RUNNING]
        left.sort(key=lambda w: (TIERS.index(w.sequence.attempt.message.tier), w.sequence.order))
        num_lost = 0
        while len(left) > 1 and num_lost < num_tokens - self.budget.num_tokens:
            work = left.pop()
            num_lost += work.num_tokens
            self.ranks.preempt(work.sequence, plan.now)
            self._num_preempted_before += 1
        return None

    # --- figures ---

    @property
    def running(self) -> dict[Tier, list[Sequence]]:
        return self.ranks.running

    @property
    def preempted(self) -> dict[Tier, list[Sequence]]:
        return self.ranks.preempted

    @property
    def num_running(self) -> int:
        return self.ranks.num_running

    @property
    def num_waiting(self) -> int:
        return self.ranks.num_waiting

    @property
    def num_waiting_tokens(self) -> int:
        """Of prompts that never ran."""
        return self.ranks.num_waiting_tokens
