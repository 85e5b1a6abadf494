"""Blocks for running sequences, one when the last is full or shared; and who loses its own where there is none. Pure.

Nobody is preempted while a step is in flight: what it gives back may be enough.
"""

from __future__ import annotations

from collections.abc import Callable

from workers.engine.queueing.fairness import VirtualCounters
from workers.engine.scheduling.block_tables import BlockTables
from workers.engine.scheduling.sequence_queues import SequenceQueues
from workers.engine.scheduling.step_plan import StepPlan
from workers.engine.sequences.sequence import Sequence, Status
from workers.engine.sequences.sparsity import Sparsity

MAX_PREEMPTED = 2
"""Who lost its blocks so often for others is chosen only where there is nobody else."""


class Growth:
    def __init__(
        self,
        ranks: SequenceQueues,
        block_tables: BlockTables,
        counters: VirtualCounters,
        sparsity: Sparsity | None = None,
    ) -> None:
        self._ranks = ranks
        self._block_tables = block_tables
        self._counters = counters
        self._sparsity = sparsity

    def is_due(self, sequence: Sequence) -> bool:
        """To write its next token: a further one, or a copy of a tail that choices share; or it is to hold fewer."""
        index = sequence.place // self._block_tables.cache.block_size
        return (
            index == len(sequence.block_ids)
            or (len(sequence.attempt.sequences) > 1 and self._block_tables.shares(sequence, index))
            or self._exceeds(sequence)
        )

    def take(self, sequences: list[Sequence], plan: StepPlan) -> bool:
        """A block for each to write to; they are one, or run together. False if there are not enough for now, or they
        were preempted for want of them."""
        asker = sequences[0]
        if self._exceeds(asker):
            return self._thin(asker, plan)
        fresh = self._fresh(asker, lambda: len(sequences), plan)
        if fresh is None:
            return False
        for sequence, block in zip(sequences, fresh, strict=True):
            index = sequence.place // self._block_tables.cache.block_size
            copy = self._block_tables.put(sequence, index, block)
            if copy is not None:
                plan.copies.append(copy)
        return True

    def _fresh(self, asker: Sequence, number: Callable[[], int], plan: StepPlan) -> list[int] | None:
        """So many blocks, whoever else loses them. Their number is asked for anew when somebody who may have shared
        with the asker is gone."""
        while (fresh := self._block_tables.fresh_blocks(asker, number(), self._ranks.reach(asker))) is None:
            if plan.ahead:
                plan.holds_next = True
                return None
            self._ranks.preempt(self._victim(asker), plan.now, plan)
            if asker.status is not Status.RUNNING:
                return None
        return fresh

    def _exceeds(self, sequence: Sequence) -> bool:
        """With its next token it would hold more than the KV budget."""
        sparsity, size = self._sparsity, self._block_tables.cache.block_size
        return (
            sparsity is not None
            and max(len(sequence.block_ids), sequence.place // size + 1) > sparsity.num_blocks
            and sparsity.applies(sequence.attempt)
        )

    def _thin(self, sequence: Sequence, plan: StepPlan) -> bool:
        """As many as the budget has stay, the one to write to among them."""
        assert self._sparsity is not None
        assert not plan.ahead, "blocks change under a step in flight"
        num_held, block_tables = len(sequence.block_ids), self._block_tables
        is_full = sequence.place == num_held * block_tables.cache.block_size
        kept = self._sparsity.kept(sequence.mass, num_held, self._sparsity.num_blocks - is_full)
        if sequence.num_dropped:
            block_tables.turn(sequence, kept)
            return True
        fresh = self._fresh(sequence, lambda: block_tables.num_common(sequence, kept) + is_full, plan)
        if fresh is None:
            return False
        plan.copies += block_tables.thin(sequence, kept, fresh, plan.step)
        sequence.attempt.event("thinned", plan.now, plan.step, sequence.num_dropped)
        return True

    def _victim(self, sequence: Sequence) -> Sequence:
        """Who loses its blocks for this one: batch, the latest; else of those that came with it or later the tenant
        with the largest counter, its latest arrival, its last choice, but nobody for the third time if another can.

        It is never planned yet: a tier's decodes are planned in order of arrival, batch after interactive; and never
        an earlier arrival of the tier, which would be the first to come back. At the worst it is the one that asks.
        """
        tier = sequence.attempt.message.tier
        batch = self._ranks.batch_victim()
        if tier == "interactive" and batch is not None:
            return batch
        running, own = self._ranks.running[tier], sequence.attempt.together(sequence)
        first = running.index(sequence)
        # Who came first would be back first.
        later = running[first:] if first else [s for s in running if s not in own] or running
        victim = max(later, key=self._sacrifice)
        # A floor does not cost an interactive sequence its last resort.
        if victim in own and tier == "interactive" and self._ranks.running["batch"]:
            return self._ranks.running["batch"][-1]
        return victim

    def _sacrifice(self, sequence: Sequence) -> tuple[bool, float, tuple[int, int]]:
        counter = self._counters[sequence.attempt.message.tenant]
        spared = sequence.num_preempted >= MAX_PREEMPTED
        return not spared, 0.0 if spared else counter, sequence.order
