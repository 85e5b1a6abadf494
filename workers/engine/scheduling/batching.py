"""Continuous batching: a step's token budget is divided over the rows of the sequences that are here now. The module is
pure.

Of each tier, interactive before batch, the decodes come first: one token each, or in turns where a step has no time for
all. Then what fits is admitted, and the rest of the budget is dealt to the prefills in chunks.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from operator import attrgetter

from workers.engine.queueing.pace import TokenBudget
from workers.engine.queueing.turns import in_turn
from workers.engine.scheduling import gangs
from workers.engine.scheduling.admission import Admission
from workers.engine.scheduling.chunks import Chunks
from workers.engine.scheduling.growth import Growth
from workers.engine.scheduling.kv_layout import KVLayout
from workers.engine.scheduling.sequence_queues import SequenceQueues
from workers.engine.scheduling.step_plan import FILL_PART, StepPlan, Work
from workers.engine.sequences.sequence import Attempt, Sequence, Status
from workers.protocol.messages import Tier


class Batching:
    def __init__(
        self,
        ranks: SequenceQueues,
        admission: Admission,
        chunks: Chunks,
        growth: Growth,
        layout: KVLayout,
        budget: TokenBudget,
    ) -> None:
        self._ranks = ranks
        self._admission = admission
        self._chunks = chunks
        self._growth = growth
        self._layout = layout
        self._token_budget = budget

    def add_interactive(self, plan: StepPlan) -> None:
        """Adds rows of the interactive tier. A step with prompts leaves batch its floor alone, and one with streams
        leaves it a part, so that arrivals do not wait for long."""
        floor = self._ranks.floor
        below = self._ranks.present("batch") and floor.due
        if below:
            self._admission.admit_below_floor(plan)
        num_whole = self._next_whole(plan) if below else 0
        reserve = floor.reserve(plan.budget, num_whole) if below else 0
        plan.budget -= reserve
        prefills = self._decode(plan, "interactive")
        self._admission.admit(plan, "interactive", prefills)
        num_rows = len(plan.work)
        is_batch_turn = num_whole and reserve  # an input that is larger than the budget would take batch's turn
        if not is_batch_turn or self._chunks.next_whole(plan, "interactive") <= plan.budget:
            self._chunks.deal(plan, "interactive", prefills)
        if len(plan.work) > num_rows:  # a sequence waits for its first token, until this step ends
            plan.budget, plan.short = 0, True
        if plan.work:
            plan.keep_short()
        plan.budget += reserve

    def add_batch(self, plan: StepPlan) -> None:
        """Adds rows of batch with what is left over."""
        prefills = self._decode(plan, "batch")
        if not self._ranks.wanted("interactive"):
            self._admission.admit(plan, "batch", prefills)
        self._chunks.deal(plan, "batch", prefills)

    def _next_whole(self, plan: StepPlan) -> int:
        """Returns the number of tokens of what batch computes next, if it is computed in one step, else 0."""
        batch = (s for s in self._ranks.running["batch"] if not plan.excludes(s))
        return self._chunks.next_whole(plan, "batch") or gangs.next_width(batch)

    def _decode(self, plan: StepPlan, tier: Tier) -> list[Sequence]:
        """Adds the decodes of a tier. Returns its running sequences that are in prefill."""
        prefills: list[Sequence] = []
        most_rows, sequences = self._rows(plan, tier)
        for sequence in sequences:
            if sequence.status is not Status.RUNNING:
                continue  # preempted for an earlier one, just now
            if sequence.restoring or plan.excludes(sequence):
                continue
            attempt = sequence.attempt
            position, pending = sequence.num_scheduled, sequence.num_pending
            num_left = len(sequence.tokens) + pending - position
            if num_left != 1 or not (pending or sequence.output):
                if num_left:
                    prefills.append(sequence)
                continue
            if pending and position + 1 >= attempt.end_len:
                continue  # whatever the pending token is, nothing follows it
            lease = attempt.lease
            if lease.bound - lease.spent - lease.in_flight < lease.stride:
                self._ranks.park(attempt, plan.now, plan.step)
                continue
            if plan.budget == 0 or len(plan.work) >= most_rows:
                continue
            if attempt.gang:
                if sequence is attempt.sequences[0]:
                    gangs.decode(plan, attempt, self._growth)
                continue
            forked = len(attempt.sequences) > 1
            if forked and plan.ahead and _ends_decide_turns(attempt):
                continue
            if self._growth.is_due(sequence) and not self._growth.take([sequence], plan):
                continue
            plan.holds_next |= attempt.needs_last_token
            lease.in_flight += 1
            plan.budget -= 1
            plan.work.append(Work(sequence, 1, 1))
        return sorted((s for s in prefills if s.status is Status.RUNNING), key=attrgetter("order"))

    def _rows(self, plan: StepPlan, tier: Tier) -> tuple[int, Seq[Sequence]]:
        """Returns the number of rows that the plan may have, and the running sequences in the order in which they get
        rows. In a step for which an interactive sequence waits, batch gets a part of the rows, whatever the streams
        take."""
        running, num_before = tuple(self._ranks.running[tier]), len(plan.work)
        most = num_before + plan.budget
        if self._ranks.present("interactive"):
            num_timely = self._token_budget.num_rows(self._mean_place(running))
            if tier == "batch":
                num_timely = max(num_timely, num_before + max(1, num_timely // FILL_PART))
            most = min(most, num_timely)
        return most, running if num_before + len(running) <= most else in_turn(running)

    def _mean_place(self, sequences: Seq[Sequence]) -> float:
        return sum(map(self._layout.place, sequences)) / max(1, len(sequences))


def _ends_decide_turns(attempt: Attempt) -> bool:
    """Returns whether endings decide which choices draw. Fewer tokens are left than choices run, so the lowest indices
    go first. Which choices these are is known when the step in flight has shown which ones ended."""
    lease = attempt.lease
    num_pending = sum(s.num_pending for s in attempt.sequences)
    num_running = sum(s.status is Status.RUNNING for s in attempt.sequences)
    return num_pending > 0 and lease.bound - lease.spent - num_pending < num_running
