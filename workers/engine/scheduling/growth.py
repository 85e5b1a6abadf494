"""Blocks for running sequences: one when the last is full or shared. If there is none, this module chooses which
sequence loses its own. The module is pure.

Nobody is preempted while a step is in flight, because the blocks that the step gives back may be enough. Nobody is
preempted who has a row in the plan already, because the row would have no blocks. Where streams take turns, fairness
may choose such a one. Then the asker has no row in this step and asks again in the next one. It does not wait for ever:
whoever had a row goes to the end of the turns, and the first of a tier to ask finds nobody of the tier with a row.
"""

from __future__ import annotations

from collections.abc import Callable

from workers.engine.queueing.fairness import VirtualCounters
from workers.engine.scheduling.block_tables import BlockTables
from workers.engine.scheduling.sequence_queues import SequenceQueues
from workers.engine.scheduling.step_plan import StepPlan
from workers.engine.sequences.sequence import Sequence, Status

MAX_PREEMPTED = 2
"""Number of preemptions for others after which a sequence is chosen only where there is no other."""


class Growth:
    def __init__(self, ranks: SequenceQueues, block_tables: BlockTables, counters: VirtualCounters) -> None:
        self._ranks = ranks
        self._block_tables = block_tables
        self._counters = counters
        self._layout = block_tables.layout

    def is_due(self, sequence: Sequence) -> bool:
        """Returns whether the sequence needs a block to write its next token: a further one, or a copy of a tail that
        choices share. It is also due if it has to hold fewer blocks."""
        index = self._layout.place(sequence) // self._block_tables.cache.block_size
        return (
            index == len(sequence.block_ids)
            or (len(sequence.attempt.sequences) > 1 and self._block_tables.shares(sequence, index))
            or self._layout.exceeds(sequence)
        )

    def take(self, sequences: list[Sequence], plan: StepPlan) -> bool:
        """Takes a block for each sequence to write to; they are one sequence, or several that run together. Returns
        False if there are not enough blocks for now, or if they were preempted for lack of blocks."""
        asker = sequences[0]
        if self._layout.exceeds(asker):
            return self._thin(asker, plan)
        fresh = self._fresh(asker, lambda: sum(map(self.is_due, sequences)), plan)
        if fresh is None:
            return False
        due = [sequence for sequence in sequences if self.is_due(sequence)]
        for sequence, block in zip(due, fresh, strict=True):
            index = self._layout.place(sequence) // self._block_tables.cache.block_size
            copy = self._block_tables.put(sequence, index, block)
            if copy is not None:
                plan.copies.append(copy)
        return True

    def _fresh(self, asker: Sequence, number: Callable[[], int], plan: StepPlan) -> list[int] | None:
        """Takes blocks, and preempts other sequences if there are too few. The number is computed again after each
        preemption, because the preempted sequence may have shared blocks with the asker. Returns None if the asker has
        to wait for the next step, or was preempted itself."""
        while (fresh := self._block_tables.fresh_blocks(asker, number(), self._ranks.reach(asker))) is None:
            if plan.ahead:
                plan.holds_next = True
                return None
            victim = self._victim(asker)
            if plan.has_row(victim):
                return None
            self._ranks.preempt(victim, plan.now, "blocks", plan)
            if asker.status is not Status.RUNNING:
                return None
        return fresh

    def _thin(self, sequence: Sequence, plan: StepPlan) -> bool:
        dropped = self._layout.num_dropped(sequence)
        if not self._layout.thin(
            sequence, plan, self._block_tables, lambda number: self._fresh(sequence, number, plan)
        ):
            return False
        if not dropped:
            sequence.attempt.report.event("thinned", plan.now, plan.step, self._layout.num_dropped(sequence))
        return True

    def _victim(self, sequence: Sequence) -> Sequence:
        """Returns the sequence that loses its blocks for this one. Batch comes first, its latest arrival. Otherwise it
        is chosen among those that came with the asker or later: of the tenant with the largest counter, its latest
        arrival, its last choice. A sequence preempted `MAX_PREEMPTED` times is spared if another can be chosen.

        It is never an earlier arrival of the tier, which would be the first to come back. At the worst it is the asker
        itself. It may have a row in the plan already where streams take turns, and only there: otherwise a tier's
        decodes are planned in order of arrival, batch after interactive.
        """
        tier = sequence.attempt.message.tier
        batch = self._ranks.batch_victim()
        if tier == "interactive" and batch is not None:
            return batch
        running, own = self._ranks.running[tier], sequence.attempt.together(sequence)
        first = running.index(sequence)
        # The earliest arrival would be the first to come back.
        later = running[first:] if first else [s for s in running if s not in own] or running
        victim = max(later, key=self._sacrifice)
        # While the floor protects batch sequences, an interactive one still takes their blocks as a last resort.
        if victim in own and tier == "interactive" and self._ranks.running["batch"]:
            return self._ranks.running["batch"][-1]
        return victim

    def _sacrifice(self, sequence: Sequence) -> tuple[bool, float, tuple[int, int]]:
        counter = self._counters[sequence.attempt.message.tenant]
        spared = sequence.num_preempted >= MAX_PREEMPTED
        return not spared, 0.0 if spared else counter, sequence.order
