"""The queues of sequences: waiting, running, preempted, parked at a lease bound. Each change of status is one method
here.

The module knows tiers, tenants' queues and the order of arrival. `block_tables` knows what a sequence holds, and the
planner decides which sequence is next.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from operator import attrgetter

from cache.blocks.usage import COLD, LAST_RESORT, SHARED, Reach
from workers.engine.queueing.deferral import Deferral
from workers.engine.queueing.floor import BatchFloor
from workers.engine.queueing.waiting import Waiting
from workers.engine.scheduling.block_tables import BlockTables
from workers.engine.scheduling.step_plan import Limits, StepPlan
from workers.engine.sequences.sequence import Attempt, Sequence, Status
from workers.engine.values.queue_figures import CAUSES, Cause
from workers.protocol.messages import ExtendLease, Tier

TIERS: tuple[Tier, ...] = ("interactive", "batch")

_order = attrgetter("order")


class SequenceQueues:
    def __init__(
        self, block_tables: BlockTables, waiting: Mapping[Tier, Waiting], deferral: Deferral, floor: BatchFloor
    ) -> None:
        self.waiting = waiting
        self.floor = floor
        self.running: dict[Tier, list[Sequence]] = {tier: [] for tier in TIERS}
        """Running sequences by arrival."""
        self.preempted: dict[Tier, list[Sequence]] = {tier: [] for tier in TIERS}
        """Preempted sequences by arrival. A sequence still has its blocks until the last step launched with it is
        collected."""
        self.num_waiting_tokens = 0
        """Number of tokens of prompts that never ran."""
        self.num_preempted: dict[Tier, dict[Cause, int]] = {tier: dict.fromkeys(CAUSES, 0) for tier in TIERS}
        """Number of preemptions since the process began, by the tier of the sequence that lost its blocks and by
        cause."""
        self._block_tables = block_tables
        self._deferral = deferral
        self._parked: dict[tuple[int, str], Attempt] = {}

    # --- new and running sequences ---

    def add(self, sequence: Sequence) -> None:
        self.waiting[sequence.attempt.message.tier].push(sequence)
        self.num_waiting_tokens += len(sequence.tokens)

    def run(self, sequence: Sequence) -> None:
        """Makes a sequence run that has its blocks. It was waiting, preempted, or forked just now."""
        tier = sequence.attempt.message.tier
        if sequence.status is Status.WAITING:
            self.waiting[tier].take(sequence)
            self.num_waiting_tokens -= len(sequence.tokens)
        elif sequence.status is Status.PREEMPTED:
            self.preempted[tier].remove(sequence)
        sequence.status = Status.RUNNING
        self._deferral.lead(sequence)
        insort(self.running[tier], sequence, key=_order)

    # --- preempted and ended sequences ---

    def preempt(self, sequence: Sequence, now: float, cause: Cause, plan: StepPlan | None = None) -> None:
        """Takes back all blocks of the sequence and of those that run with it. With a plan, this happens for another
        sequence's sake: `cause` is blocks or tier. Without one, it was at its bound, or the step it was in did not
        fit the device."""
        for one in sequence.attempt.together(sequence):
            if one.status is Status.RUNNING:
                self._preempt(one, now, cause, plan)

    def _preempt(self, sequence: Sequence, now: float, cause: Cause, plan: StepPlan | None) -> None:
        step = -1
        self.num_preempted[sequence.attempt.message.tier][cause] += 1
        if plan is not None:
            step = plan.step
            plan.num_preempted += 1
            sequence.num_preempted += 1
        sequence.attempt.report.event("preempted", now, step, sequence.num_computed)
        self._stop(sequence)
        self._block_tables.make_room(sequence, needed=plan is not None)
        if sequence.attempt.at_bound:
            sequence.status = Status.SUSPENDED
            self.park(sequence.attempt, now, step)
        else:
            self._queue_preempted(sequence)

    def end(self, sequence: Sequence) -> None:
        """Ends a sequence in any state. Its blocks are free, or evictable, when no launched step uses them any more."""
        tier = sequence.attempt.message.tier
        if sequence.status is Status.WAITING:
            self.waiting[tier].remove(sequence)
            self.num_waiting_tokens -= len(sequence.tokens)
        elif sequence.status is Status.RUNNING:
            self._stop(sequence)
            self._block_tables.let_go(sequence)
        elif sequence.status is Status.PREEMPTED:
            self.preempted[tier].remove(sequence)
        self._block_tables.forget(sequence)
        sequence.status = Status.ENDED

    def leave(self, attempt: Attempt) -> None:
        """Removes an attempt after the last of its sequences ended."""
        self._parked.pop(attempt.key, None)

    # --- the lease bound ---

    def park(self, attempt: Attempt, now: float, step: int) -> None:
        """Parks an attempt at its bound. It is not parked while a step in flight, or a sibling in this very step,
        spends the last of the lease."""
        if attempt.lease.in_flight == 0 and attempt.lease.park(now):
            self._parked[attempt.key] = attempt
            attempt.report.event("parked", now, step)

    def extend(self, attempt: Attempt, message: ExtendLease, now: float) -> None:
        attempt.lease.extend(message, now)
        if not attempt.at_bound:
            self._unpark(attempt, now)

    def _unpark(self, attempt: Attempt, now: float) -> None:
        if attempt.lease.parked_at is not None:
            attempt.lease.parked_at = None
            attempt.report.event("unparked", now)
        for sequence in attempt.sequences:
            if sequence.status is Status.SUSPENDED:
                self._queue_preempted(sequence)

    def first_preempted(self, tier: Tier, plan: StepPlan) -> Sequence | None:
        preempted = self.preempted[tier]
        while preempted and preempted[0].attempt.at_bound:  # its siblings spent the lease meanwhile
            sequence = preempted.pop(0)
            sequence.status = Status.SUSPENDED
            self.park(sequence.attempt, plan.now, plan.step)
        return preempted[0] if preempted else None

    def expire(self, now: float, limits: Limits) -> list[Attempt]:
        """Preempts attempts that were parked for a while. Returns those to be ended, because the gateway sent nothing
        for long."""
        lost: list[Attempt] = []
        for key, attempt in list(self._parked.items()):
            lease = attempt.lease
            if lease.parked_at is None:
                del self._parked[key]
            elif not attempt.at_bound:
                self._unpark(attempt, now)  # choices were cancelled: the lease allows a token of each of the others
            elif now - lease.heard_at >= limits.lease_silence_s:
                lost.append(attempt)
            elif now - lease.parked_at >= limits.lease_wait_s:
                for sequence in attempt.sequences:
                    if sequence.status is Status.RUNNING:
                        self.preempt(sequence, now, "lease")
        return lost

    # --- batch below its floor ---

    def batch_victim(self) -> Sequence | None:
        """Returns the batch sequence to preempt first, or None if none may be."""
        batch = self.running["batch"]
        protected = self.floor.num_protected if self.floor.due else 0
        return batch[-1] if len(batch) > protected else None

    @property
    def num_owed(self) -> int:
        """Number of batch sequences that may enter before interactive ones, because batch is below its floor."""
        return max(0, self.floor.num_protected - len(self.running["batch"])) if self.floor.due else 0

    # --- figures ---

    def present(self, tier: Tier) -> bool:
        """Returns whether a sequence of this tier runs or waits."""
        return bool(self.running[tier]) or self.wanted(tier)

    def reach(self, sequence: Sequence) -> Reach:
        """Returns what a sequence that runs, or is to run next, may evict. Of batch one sequence at a time may evict
        nodes that chats used recently, so that batch always moves. Its own leftovers go first, so that a sweep costs
        chats no more than one sequence. Floors give way before an interactive sequence does, and for a sequence that
        runs alone."""
        interactive = sequence.attempt.message.tier == "interactive"
        num_own = sum(s.status is Status.RUNNING for s in sequence.attempt.together(sequence))
        runs = num_own > 0
        num_batch = len(self.running["batch"]) - (0 if interactive else num_own)
        num_others = self.num_running - num_own
        if num_others == 0 if not runs or not interactive else num_batch == 0:
            return LAST_RESORT if runs or not self._block_tables.num_leaving else SHARED
        return SHARED if interactive or num_batch == 0 else COLD

    def wanted(self, tier: Tier) -> bool:
        """Returns whether a sequence of this tier waits for blocks or to be run."""
        return bool(self.preempted[tier]) or len(self.waiting[tier]) > 0

    @property
    def num_running(self) -> int:
        return sum(map(len, self.running.values()))

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self.waiting.values())) + sum(map(len, self.preempted.values()))

    def _queue_preempted(self, sequence: Sequence) -> None:
        sequence.status = Status.PREEMPTED
        insort(self.preempted[sequence.attempt.message.tier], sequence, key=_order)

    def _stop(self, sequence: Sequence) -> None:
        self.running[sequence.attempt.message.tier].remove(sequence)
        self._deferral.forget(sequence)
