"""Who computes what in the next step, and who holds which blocks. Pure: values in, a plan out; the cache is its one partner.

Of each tier, interactive before batch, a plan takes decodes first (one token each), then admits what fits, then deals
the rest of the token budget over all prefills in equal shares. Blocks for a whole uncached prompt are taken at
admission, those for output one by one; when one is missing, the latest arrival loses its own (recompute: what it had
committed stays in the tree). Between `plan` and `advance` of the same step nothing else may touch the scheduler.

Why it cannot deadlock: a sequence that runs alone always fits, because `Limits.max_len` is at most what the pool holds
beside its pins; the earliest sequence of a tier is never preempted for a later one; and nothing of a tier is admitted
while a preempted one waits.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from cache.prefix_cache import PrefixCache
from workers.engine.fairness import FairQueue, VirtualCounters
from workers.engine.record import StepRecord
from workers.engine.sequence import Attempt, Sequence, Status
from workers.protocol.messages import ExtendLease, Tier

TIERS: tuple[Tier, ...] = ("interactive", "batch")
PRIORITIES: dict[Tier, int] = {"interactive": 50, "batch": 20}
"""Of prompt blocks in the prefix tree (engine.md section 2.4)."""

MAX_SHARED_PREFILLS = 4
"""Prompts in prefill at once when the budget is short: a few, so that a short one is not stuck behind a long one;
not all, because equal shares would make everybody late."""

WATERMARK_SHARE = 100
"""1 % of the pool stays free at admission, at least a block per running sequence."""

MAX_TICK_TIMES = 4096

_order = attrgetter("order")


@dataclass(frozen=True, slots=True)
class Limits:
    max_batch_tokens: int
    max_running: int
    max_len: int
    """Tokens of prompt and output together: what model and pool can hold."""
    lease_wait_s: float = 2.0
    lease_silence_s: float = 15.0

    def __post_init__(self) -> None:
        if self.max_running > self.max_batch_tokens:
            raise ValueError("max_batch_tokens must be at least max_running: each decode takes one")


class Work(NamedTuple):
    sequence: Sequence
    num_tokens: int
    num_draws: int


@dataclass(slots=True)
class StepPlan:
    step: int
    now: float
    budget: int
    """Tokens not yet dealt out."""
    work: list[Work] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    num_preempted: int = 0
    num_cached_tokens: int = 0


class Scheduler:
    def __init__(self, cache: PrefixCache, limits: Limits) -> None:
        self.cache = cache
        self.limits = limits
        self.counters = VirtualCounters()
        self.waiting: dict[Tier, FairQueue[Sequence]] = {t: FairQueue(self.counters) for t in TIERS}
        self.running: dict[Tier, list[Sequence]] = {tier: [] for tier in TIERS}
        self.preempted: dict[Tier, list[Sequence]] = {tier: [] for tier in TIERS}
        self._parked: dict[tuple[int, str], Attempt] = {}
        self._num_waiting_tokens = 0
        self._tick_times: deque[float] = deque(maxlen=MAX_TICK_TIMES)

    # --- attempts come, hear from their gateway, go ---

    def add(self, attempt: Attempt) -> None:
        message = attempt.message
        self.counters.enter(message.tenant, message.weight)
        for sequence in attempt.sequences:
            self.waiting[message.tier].push(message.tenant, sequence)
            self._num_waiting_tokens += len(sequence.tokens)

    def extend(self, attempt: Attempt, message: ExtendLease, now: float) -> None:
        attempt.lease.extend(message, now)
        if attempt.lease.left <= 0:
            return
        for sequence in attempt.sequences:
            if sequence.status is Status.SUSPENDED:
                sequence.status = Status.PREEMPTED
                insort(self.preempted[attempt.message.tier], sequence, key=_order)

    def end(self, sequence: Sequence) -> None:
        """From any state; its blocks are free, or evictable, on return."""
        tier = sequence.attempt.message.tier
        if sequence.status is Status.WAITING:
            self._leave_queue(sequence)
        elif sequence.status is Status.RUNNING:
            self.running[tier].remove(sequence)
            self._release(sequence)
        elif sequence.status is Status.PREEMPTED:
            self.preempted[tier].remove(sequence)
        sequence.status = Status.ENDED

    def leave(self, attempt: Attempt) -> None:
        """After the last of its sequences ended."""
        self._parked.pop(attempt.key, None)
        self.counters.leave(attempt.message.tenant)

    def expire(self, now: float) -> list[Attempt]:
        """Parked attempts lose their blocks after a while; those nobody spoke to for long are returned, to be ended."""
        lost: list[Attempt] = []
        for key, attempt in list(self._parked.items()):
            lease = attempt.lease
            if lease.parked_at is None:
                del self._parked[key]
            elif now - lease.heard_at >= self.limits.lease_silence_s:
                lost.append(attempt)
            elif now - lease.parked_at >= self.limits.lease_wait_s:
                for sequence in attempt.sequences:
                    if sequence.status is Status.RUNNING:
                        self._preempt(sequence, now)
        return lost

    # --- the plan of a step ---

    def plan(self, step: int, now: float) -> StepPlan:
        self.cache.tick()
        self._tick_times.append(now)
        plan = StepPlan(step, now, self.limits.max_batch_tokens)
        for tier in TIERS:
            self._plan_decodes(plan, tier)
            prefills = [s for s in self.running[tier] if not s.decoding]
            if tier == "interactive" or not self._wanted("interactive"):
                self._admit(plan, tier, prefills)
            self._plan_chunks(plan, [s for s in prefills if s.status is Status.RUNNING])
        return plan

    def _plan_decodes(self, plan: StepPlan, tier: Tier) -> None:
        block_size = self.cache.block_size
        for sequence in tuple(self.running[tier]):
            position = sequence.num_computed
            if position != len(sequence.tokens) - 1 or not sequence.output:
                continue
            if sequence.status is not Status.RUNNING:
                continue  # preempted for an earlier one, a moment ago
            attempt = sequence.attempt
            lease = attempt.lease
            if lease.bound - lease.spent - lease.in_flight <= 0:
                self._park(attempt, plan.now, plan.step)
                continue
            if plan.budget == 0:
                return
            index = position // block_size
            block_ids = sequence.block_ids
            new = index == len(block_ids)
            shared = not new and attempt.forked and self.cache.refcount(block_ids[index]) > 1
            if (new or shared) and not self._take_block(sequence, index, plan):
                continue
            lease.in_flight += 1
            plan.budget -= 1
            plan.work.append(Work(sequence, 1, 1))

    def _take_block(self, sequence: Sequence, index: int, plan: StepPlan) -> bool:
        """A block of its own to write to: a further one, or a copy of a tail that choices share. False if the sequence
        was preempted for want of it."""
        while (fresh := self.cache.allocate(1)) is None:
            victim = self._victim(sequence)
            self._preempt(victim, plan.now, plan)
            if victim is sequence:
                return False
        if index == len(sequence.block_ids):
            sequence.block_ids.append(fresh[0])
            return True
        shared = sequence.block_ids[index]
        if self.cache.refcount(shared) == 1:  # who shared it was just preempted: nothing to copy
            self.cache.free(fresh)
        else:
            plan.copies.append((shared, fresh[0]))
            self.cache.free([shared])
            sequence.block_ids[index] = fresh[0]
        return True

    def _victim(self, sequence: Sequence) -> Sequence:
        """Batch before interactive, the latest arrival, its last choice; at the worst the one that asks.

        It is never planned yet: a tier's decodes are planned in order of arrival, batch after interactive.
        """
        if self.running["batch"]:
            return self.running["batch"][-1]
        return self.running[sequence.attempt.message.tier][-1]

    def _plan_chunks(self, plan: StepPlan, prefills: list[Sequence]) -> None:
        """Equal shares of the budget; what a short prompt leaves over goes to the longer ones."""
        prefills.sort(key=lambda s: s.num_uncomputed)
        for position, sequence in enumerate(prefills):
            if plan.budget == 0:
                return
            share = max(1, plan.budget // (len(prefills) - position))
            num_tokens = min(sequence.num_uncomputed, share)
            num_draws = 0
            if num_tokens == sequence.num_uncomputed:
                num_draws = self._draws_within_lease(sequence)
                if num_draws < 0:
                    num_tokens -= 1  # the last token waits for the lease: its logits are wanted
            if num_tokens == 0:
                self._park(sequence.attempt, plan.now, plan.step)
                continue
            sequence.attempt.lease.in_flight += max(0, num_draws)
            plan.budget -= num_tokens
            plan.work.append(Work(sequence, num_tokens, max(0, num_draws)))

    def _draws_within_lease(self, sequence: Sequence) -> int:
        """Draws at the end of a prefill; -1: the lease has to grow before."""
        lease = sequence.attempt.lease
        if lease.left >= sequence.num_draws:
            return sequence.num_draws
        return lease.left if lease.last and lease.left > 0 else -1

    def _park(self, attempt: Attempt, now: float, step: int) -> None:
        """At its bound. Not so if a sibling spends the last of the lease in this very step."""
        if attempt.lease.in_flight == 0 and attempt.lease.park(now):
            self._parked[attempt.key] = attempt
            attempt.event("parked", now, step)

    # --- admission ---

    def _admit(self, plan: StepPlan, tier: Tier, prefills: list[Sequence]) -> None:
        """Preempted ones first, then whom fairness names; adds to `prefills`."""
        claimed = sum(s.num_uncomputed for s in prefills)
        while plan.num_preempted == 0 and plan.budget > 0:
            if claimed >= plan.budget and len(prefills) >= MAX_SHARED_PREFILLS:
                return
            sequence = self._next(tier, plan)
            if sequence is None or self._sibling_prefills(sequence):
                return
            if not self._try_admit(sequence, plan):
                if tier == "interactive" and self.running["batch"]:
                    self._preempt(self.running["batch"][-1], plan.now, plan)
                return
            prefills.append(sequence)
            claimed += sequence.num_uncomputed

    def _wanted(self, tier: Tier) -> bool:
        """Somebody of this tier waits for blocks or a place."""
        return bool(self.preempted[tier]) or len(self.waiting[tier]) > 0

    def _next(self, tier: Tier, plan: StepPlan) -> Sequence | None:
        preempted = self.preempted[tier]
        while preempted and preempted[0].attempt.at_bound:  # its siblings spent the lease meanwhile
            sequence = preempted.pop(0)
            sequence.status = Status.SUSPENDED
            self._park(sequence.attempt, plan.now, plan.step)
        return preempted[0] if preempted else self.waiting[tier].peek()

    def _sibling_prefills(self, sequence: Sequence) -> bool:
        """Choices that were preempted come back one after the other: the next one finds the prompt in the tree."""
        return any(
            other.status is Status.RUNNING and not other.decoding
            for other in sequence.attempt.sequences
        )

    def _try_admit(self, sequence: Sequence, plan: StepPlan) -> bool:
        attempt, cache = sequence.attempt, self.cache
        message = attempt.message
        running = [s for tier in TIERS for s in self.running[tier]]
        num_places = sum(s.num_choices for s in running) + sequence.num_choices
        if num_places > self.limits.max_running:
            return False
        read = message.cache_read and not attempt.wants_prompt_logprobs
        handle = cache.acquire(
            attempt.path,
            sequence.tokens,
            tenant=message.tenant,
            read=read,
            priority=PRIORITIES[message.tier],
        )
        num_blocks = -(-len(sequence.tokens) // cache.block_size) - len(handle.block_ids)
        spare = self._spare_blocks(sequence, len(running)) if running else 0
        fresh = cache.allocate(num_blocks) if num_blocks + spare <= cache.num_available else None
        if fresh is None:
            cache.release(handle, handle.block_ids)
            return False
        sequence.handle = handle
        sequence.block_ids = handle.block_ids + fresh
        sequence.num_computed = handle.num_tokens
        sequence.num_offered_blocks = handle.num_tree_blocks
        self._enter_running(sequence, plan)
        return True

    def _leave_queue(self, sequence: Sequence) -> None:
        message = sequence.attempt.message
        self.waiting[message.tier].remove(message.tenant, sequence)
        self._num_waiting_tokens -= len(sequence.tokens)

    def _spare_blocks(self, sequence: Sequence, num_running: int) -> int:
        """What has to stay available behind an admission: the first lease, a tail per further choice, the watermark;
        twice that for one that was preempted, so that it is not at once again."""
        lease = min(
            sequence.attempt.lease.left, sequence.attempt.message.max_tokens * sequence.num_choices
        )
        watermark = max(self.cache.num_blocks // WATERMARK_SHARE, num_running + 1)
        if sequence.status is Status.PREEMPTED:
            watermark *= 2
        return -(-max(0, lease) // self.cache.block_size) + sequence.num_choices - 1 + watermark

    def _enter_running(self, sequence: Sequence, plan: StepPlan) -> None:
        attempt, handle = sequence.attempt, sequence.handle
        message = attempt.message
        assert handle is not None
        if sequence.status is Status.PREEMPTED:
            self.preempted[message.tier].remove(sequence)
        else:
            self._leave_queue(sequence)
        resumed = sequence.status is Status.PREEMPTED
        sequence.status = Status.RUNNING
        insort(self.running[message.tier], sequence, key=_order)
        num_new = attempt.account.read_until(handle.num_tokens)
        plan.num_cached_tokens += num_new
        self.counters.charge(message.tenant, cached=num_new)
        if attempt.wants_prompt_logprobs:
            attempt.prompt_logprobs = [None]
        attempt.admitted(handle, self._age_ms(handle.evicted_age, plan.now))
        attempt.event("resumed" if resumed else "matched", plan.now, plan.step, handle.num_tokens)

    def _age_ms(self, age: int, now: float) -> int:
        """The cache counts in steps, a report in time; beyond what is remembered, at least that long."""
        if age < 0:
            return -1
        since = self._tick_times[max(0, len(self._tick_times) - 1 - age)]
        return int((now - since) * 1000)

    # --- after the step ran ---

    def advance(self, work: Work, record: StepRecord) -> None:
        """KV of `work` is written: count it, and publish the blocks it filled."""
        sequence, num_tokens, _ = work
        start = sequence.num_computed
        end = sequence.num_computed = start + num_tokens
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
            self._publish(sequence)

    def fork(self, sequence: Sequence, indices: list[int]) -> list[Sequence]:
        """The choices that continue from a finished prefill, the carrier itself first. Shares every block; a partly
        filled tail is copied by whoever writes to it first."""
        handle, tier = sequence.handle, sequence.attempt.message.tier
        assert handle is not None
        # Draws may have moved the carrier behind others of its attempt, never behind another arrival.
        sequence.take_index(indices[0])
        children = []
        for index in indices[1:]:
            child = sequence.fork(index)
            child.handle = self.cache.fork(handle)
            self.cache.share(child.block_ids[handle.num_tree_blocks :])
            sequence.attempt.sequences.append(child)
            insort(self.running[tier], child, key=_order)
            children.append(child)
        return [sequence, *children]

    def _publish(self, sequence: Sequence) -> None:
        attempt, handle = sequence.attempt, sequence.handle
        assert handle is not None
        block_size = self.cache.block_size
        result = self.cache.commit(
            handle,
            sequence.tokens,
            sequence.block_ids,
            sequence.num_computed,
            priority=PRIORITIES[attempt.message.tier],
            prompt_len=len(attempt.prompt),
            write=attempt.message.cache_write,
        )
        sequence.block_ids = result.block_ids
        sequence.num_offered_blocks = sequence.num_computed // block_size
        if result.num_inserted_blocks:
            first = result.num_tree_blocks - result.num_inserted_blocks
            attempt.account.insert(first * block_size, result.num_tree_blocks * block_size)

    # --- giving back ---

    def _preempt(self, sequence: Sequence, now: float, plan: StepPlan | None = None) -> None:
        """Takes all blocks back. With a plan: for somebody else's sake; without: because it stood at its bound."""
        tier = sequence.attempt.message.tier
        self.running[tier].remove(sequence)
        self._release(sequence)
        step = -1
        if plan is not None:
            step = plan.step
            plan.num_preempted += 1
        sequence.attempt.event("preempted", now, step, sequence.num_computed)
        sequence.num_computed = 0
        if sequence.attempt.at_bound:
            sequence.status = Status.SUSPENDED
            self._park(sequence.attempt, now, step)
        else:
            sequence.status = Status.PREEMPTED
            insort(self.preempted[tier], sequence, key=_order)

    def _release(self, sequence: Sequence) -> None:
        assert sequence.handle is not None
        self.cache.release(sequence.handle, sequence.block_ids)
        sequence.handle = None
        sequence.block_ids = []

    # --- figures ---

    @property
    def num_running(self) -> int:
        return sum(map(len, self.running.values()))

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self.waiting.values())) + sum(map(len, self.preempted.values()))

    @property
    def num_waiting_tokens(self) -> int:
        """Of prompts that never ran."""
        return self._num_waiting_tokens
