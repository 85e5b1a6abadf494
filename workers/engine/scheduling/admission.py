"""Choice of the sequences that may start to run: the preempted ones first, then those that fairness selects, while
there are blocks and the number of running sequences allows it. The module is pure.

The blocks for a whole uncached prompt are taken here. While the first of a tier finds no room, nothing else of the tier
enters but what `overtaking` lets pass, and nothing enters in a step that preempted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

from cache.tree.misses import behind
from workers.engine.queueing.deferral import MAX_STEPS, Deferral
from workers.engine.queueing.fairness import VirtualCounters
from workers.engine.queueing.waiting import Group
from workers.engine.scheduling.block_tables import BlockTables
from workers.engine.scheduling.gangs import num_blocks_of_others
from workers.engine.scheduling.overtaking import MAX_LOOKED, MAX_PASSED_BY_ONE, Need, Overtaking
from workers.engine.scheduling.sequence_queues import TIERS, SequenceQueues
from workers.engine.scheduling.step_plan import Limits, StepPlan
from workers.engine.sequences.sequence import Sequence, Status
from workers.engine.sizing.capacity import WATERMARK_SHARE
from workers.protocol.messages import Tier

MAX_SHARED_PREFILLS = 4
"""Largest number of prompts in prefill at once when the budget is short. A few are allowed, so that a short prompt does
not wait for a long one. Not all are, because equal shares would make everybody late."""

MAX_PREFILLS = 16
"""Largest number of prompts in prefill, counting those of tenants that have no other prompt in prefill."""

MAX_STEP_TIMES = 4096


class Admission:
    def __init__(
        self,
        ranks: SequenceQueues,
        block_tables: BlockTables,
        deferral: Deferral,
        counters: VirtualCounters,
        limits: Limits,
    ) -> None:
        self._ranks = ranks
        self._block_tables = block_tables
        self._deferral = deferral
        self._counters = counters
        self._limits = limits
        self._overtaking = {tier: Overtaking(block_tables, limits.max_running) for tier in TIERS}
        self._step_times: deque[float] = deque(maxlen=MAX_STEP_TIMES)
        self.is_full = False
        """Whether in the last plan an interactive sequence waited for a free running slot or for blocks, and nobody
        could give way."""

    def begin_plan(self, now: float) -> None:
        """Begins a plan. The cache measures its age in these steps."""
        self._block_tables.cache.begin_step()
        self.is_full = False
        self._step_times.append(now)
        for overtaking in self._overtaking.values():
            overtaking.begin_plan()

    def admit_below_floor(self, plan: StepPlan) -> None:
        """Admits one batch sequence in a step, before interactive ones, while batch is below its floor."""
        if plan.num_preempted == 0 and self._ranks.num_owed:
            sequence = self._next("batch", plan)
            if sequence is not None and not self._try(sequence, plan):
                self._pass(sequence, plan, None)

    def admit(self, plan: StepPlan, tier: Tier, prefills: list[Sequence]) -> None:
        """Admits sequences of a tier and adds those to be computed to `prefills`."""
        claimed = sum(s.num_unscheduled for s in prefills)
        head: Sequence | None = None
        while plan.num_preempted == 0 and plan.budget > 0:
            crowd = prefills if claimed >= plan.budget else None
            if head is None:
                sequence = self._next(tier, plan)
                if sequence is None or (crowd is not None and self._crowded(sequence, crowd)):
                    return
                if not self._try(sequence, plan):
                    if self._gives_way(tier, plan):
                        return
                    head, sequence = sequence, self._pass(sequence, plan, crowd)
            else:
                sequence = self._pass(head, plan, crowd)
            if sequence is None:
                return
            if not (sequence.restoring or plan.excludes(sequence)):
                prefills.append(sequence)
                claimed += sequence.num_unscheduled

    def _gives_way(self, tier: Tier, plan: StepPlan) -> bool:
        """Returns whether a batch sequence gives way to an interactive one that found no room."""
        if tier != "interactive":
            return False
        victim = self._ranks.batch_victim()
        if victim is None:
            self.is_full = True
            return False
        self._make_room(victim, plan)
        return True

    def _pass(self, head: Sequence, plan: StepPlan, crowd: list[Sequence] | None) -> Sequence | None:
        """Lets a sequence of another tenant enter before one that does not fit. Returns it, or None if there is none
        that may. `crowd` are the prompts in prefill if they have the whole step already."""
        overtaking = self._overtaking[head.attempt.message.tier]
        if overtaking.is_closed(head) or (head.num_choices == 1 and not self._has_place(head, self._running)):
            return None  # where one place is too many, nobody needs fewer
        needs = [self._need(head)]
        for sequence in self._behind(head, plan):
            if all(overtaking.allows(sequence, need) for need in needs):
                if crowd is not None and self._crowded(sequence, crowd):
                    return None
                if self._try(sequence, plan):
                    overtaking.passed(sequence, [need.sequence for need in needs])
                    return sequence
                if len(needs) == MAX_PASSED_BY_ONE:
                    return None
                needs.append(self._need(sequence))
        return None

    def _need(self, sequence: Sequence) -> Need:
        return Need(sequence, self._spare_blocks(sequence, self._ranks.num_running + 1), self._num_kept(sequence, []))

    def _behind(self, head: Sequence, plan: StepPlan) -> Iterator[Sequence]:
        """Yields the sequences of other tenants that would be next, one of each: some preempted ones, then some that
        never ran."""
        tier = head.attempt.message.tier
        firsts: dict[str, Sequence] = {}
        for sequence in self._ranks.preempted[tier]:
            firsts.setdefault(sequence.attempt.message.tenant, sequence)
        tenants = {head.attempt.message.tenant, *firsts}
        ready = (
            s for s in firsts.values() if not (s.attempt.at_bound or s.handle is not None or self._sibling_prefills(s))
        )
        yield from list(islice(ready, MAX_LOOKED))
        waiting = self._ranks.waiting[tier]
        for _ in range(MAX_LOOKED):
            first = waiting.peek(lambda group: self._waits(group, plan.step), tenants)
            if first is None:
                return
            tenants.add(first.attempt.message.tenant)
            yield first

    def _crowded(self, sequence: Sequence, prefills: list[Sequence]) -> bool:
        """Returns whether there are too many prefills for this sequence. A tenant that has no prompt in prefill is let
        in beside those that have, because it will be served before them."""
        tenant = sequence.attempt.message.tenant
        own = sum(s.attempt.message.tenant == tenant for s in prefills)
        return len(prefills) >= (MAX_SHARED_PREFILLS if own else MAX_PREFILLS)

    def _next(self, tier: Tier, plan: StepPlan) -> Sequence | None:
        sequence = self._ranks.first_preempted(tier, plan)
        if sequence is None:
            sequence = self._ranks.waiting[tier].peek(lambda group: self._waits(group, plan.step))
        elif sequence.handle is not None:
            return None  # it was preempted just now: a step in flight still uses its blocks
        if sequence is None or self._sibling_prefills(sequence):
            return None
        return sequence

    def _waits(self, group: Group, step: int) -> bool:
        """Returns whether the group waits for a leader that is computing the block that the group misses, or its head for
        another choice of its attempt."""
        if self._sibling_prefills(group.head):
            return True
        probe = group.probe
        if self._deferral.leader(group.head, probe.num_tokens, probe.next_key) is None:
            return False
        if group.deferred_at < 0:
            group.deferred_at = step
        return step - group.deferred_at < MAX_STEPS

    def _sibling_prefills(self, sequence: Sequence) -> bool:
        """Returns whether another choice of the attempt is in prefill. Preempted choices come back one after the other,
        so that the next one finds the prompt in the tree, and so do those of a lost worker."""
        if sequence.attempt.inputs is not None:
            return False
        return any(other.status is Status.RUNNING and not other.decoding for other in sequence.attempt.sequences)

    def _make_room(self, victim: Sequence, plan: StepPlan) -> None:
        """Preempts a batch sequence for an interactive one, or delays the next plan if a step is in flight."""
        if plan.ahead:
            plan.holds_next = True
        else:
            self._ranks.preempt(victim, plan.now, "tier", plan)

    @property
    def _running(self) -> list[Sequence]:
        return [s for tier in TIERS for s in self._ranks.running[tier]]

    def _has_place(self, sequence: Sequence, running: list[Sequence]) -> bool:
        """Returns whether there are running slots for the sequence."""
        num_places = sum(s.num_choices for s in running) + self._block_tables.num_leaving
        return sequence.num_choices <= self._limits.max_running - num_places - self._num_kept(sequence, running)

    def _num_kept(self, sequence: Sequence, running: list[Sequence]) -> int:
        """Returns the number of running slots that this sequence leaves free. A wide one may have them on a worker that
        has nothing else."""
        return min(self._kept_free(sequence, running), self._limits.max_running - sequence.num_choices)

    def _try(self, sequence: Sequence, plan: StepPlan) -> bool:
        running = self._running
        if not self._has_place(sequence, running):
            return False
        alone = all(s.attempt is sequence.attempt for s in running) and (not running or sequence.in_gang)
        num_spare = 0 if alone else self._spare_blocks(sequence, len(running))
        if not self._block_tables.acquire(sequence, num_spare, self._ranks.reach(sequence)):
            return False
        self._enter(sequence, plan)
        return True

    def _kept_free(self, sequence: Sequence, running: list[Sequence]) -> int:
        """Returns the number of running slots that this sequence may not take. They are kept so that interactive
        arrivals need not preempt batch, so that a tenant with nothing here need not wait for one that has much, and so
        that batch comes to its floor."""
        num_owed = self._ranks.num_owed
        if sequence.attempt.message.tier == "batch":
            return 0 if num_owed else self._limits.max_running // 8
        kept = num_owed if self._ranks.wanted("batch") else 0
        return self._kept_for_newcomers(sequence, running) + kept

    def _kept_for_newcomers(self, sequence: Sequence, running: list[Sequence]) -> int:
        tenant = sequence.attempt.message.tenant
        others = all(s.attempt.message.tenant != tenant for s in running)
        return 0 if others else self._limits.max_running // 16

    def _spare_blocks(self, sequence: Sequence, num_running: int) -> int:
        """Returns the number of blocks that have to stay available after an admission: the first lease, a tail for each
        further choice, copies, and the watermark. The watermark is doubled for a sequence that was preempted, so that
        it is not preempted again at once."""
        cache = self._block_tables.cache
        lease = sequence.num_leased
        watermark = max(cache.num_blocks // WATERMARK_SHARE, num_running + 1)
        if sequence.status is Status.PREEMPTED:
            watermark *= 2
        num_tails = sequence.num_choices - 1 + num_blocks_of_others(sequence, cache.block_size)
        num_tails += self._block_tables.layout.num_copies(sequence.attempt)
        return -(-lease // cache.block_size) + num_tails + watermark

    def _enter(self, sequence: Sequence, plan: StepPlan) -> None:
        attempt, handle = sequence.attempt, sequence.handle
        assert handle is not None
        resumed = sequence.status is Status.PREEMPTED
        self._ranks.run(sequence)
        if not resumed:
            self._block_tables.cache.hit(handle)
        num_new = sequence.account.read_until(handle.num_tokens)
        plan.num_cached_tokens += num_new
        if not attempt.charged:
            # The whole prompt is charged at once. Otherwise a tenant could fill every running slot before its first
            # chunk is charged.
            attempt.charged = True
            num_left = attempt.account.num_tokens - attempt.account.num_seen
            self._counters.charge(attempt.message.tenant, computed=num_left, cached=num_new)
        elif attempt.inputs is not None and num_new:
            self._counters.refund(attempt.message.tenant, computed=num_new)
            self._counters.charge(attempt.message.tenant, cached=num_new)
        if attempt.wants_prompt_logprobs:
            attempt.prompt_logprobs = [None]
        attempt.report.admitted(handle, self._age_ms(handle.evicted_age, plan.now))
        attempt.report.event("resumed" if resumed else "matched", plan.now, plan.step, handle.num_tokens)

    def take_restored(self, plan: StepPlan) -> list[Sequence]:
        """Returns the sequences whose blocks are filled. They continue after those blocks, and the restored part of the
        prompt counts as cached like any other."""
        restores = self._block_tables.restores
        restored = restores.poll() if restores is not None else []
        for sequence, was_swapped in restored:
            attempt = sequence.attempt
            first, tenant = not sequence.account.num_computed, attempt.message.tenant
            num_new = sequence.account.read_until(sequence.num_computed)
            plan.num_cached_tokens += num_new
            self._counters.refund(tenant, computed=num_new)
            self._counters.charge(tenant, cached=num_new)
            if first and num_new:
                self._report(sequence, num_new)
            attempt.report.event(
                "swapped_in" if was_swapped else "restored", plan.now, plan.step, sequence.num_computed
            )
        return [sequence for sequence, _ in restored]

    def _report(self, sequence: Sequence, num_new: int) -> None:
        handle, end = sequence.handle, sequence.num_computed
        assert handle is not None
        num_missed, size = len(sequence.tokens) - end, self._block_tables.cache.block_size
        sequence.attempt.report.restored(num_new, behind(handle.miss_reason, end, num_missed, size))

    def _age_ms(self, age: int, now: float) -> int:
        """Returns the age in milliseconds. The cache counts in steps, and a report counts in time. For an age beyond
        the remembered steps the result is a lower bound."""
        if age < 0:
            return -1
        since = self._step_times[max(0, len(self._step_times) - 1 - age)]
        return int((now - since) * 1000)
