"""Who of a plan gets proposals, and how many. Decides from values; the proposer and the cache are its partners.

Proposals are what is left over: of the step's token budget, of the lease, of free blocks. Nobody is preempted for
them. A plan with proposals is collected before the next one is made, because that one builds on how many were right.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from cache.prefix_cache import PrefixCache
from workers.engine.sampling.params import penalizes
from workers.engine.sequence import Sequence
from workers.engine.speculate.proposer import Ask, Drafting, Proposer
from workers.engine.step_plan import StepPlan, Work


class Speculation:
    def __init__(
        self,
        proposer: Proposer,
        cache: PrefixCache,
        *,
        max_proposals: int = 8,
        max_step_tokens: int = 128,
    ) -> None:
        """`max_proposals`: for one sequence in a step. `max_step_tokens`: rows of a plan times tokens of each: above it
        a step is bound by arithmetic, and proposals are no longer nearly free."""
        self._proposer = proposer
        self._cache = cache
        self._max_proposals = max_proposals
        self._max_step_tokens = max_step_tokens

    # --- a plan that is complete but for proposals ---

    def extend(self, plan: StepPlan) -> None:
        """Decode rows grow by what is proposed for them."""
        if not plan.work:
            return
        most = min(self._max_proposals, self._max_step_tokens // len(plan.work) - 1)
        if most < 1:
            return
        places, asks = [], []
        for place, work in enumerate(plan.work):
            sequence = work.sequence
            if not (work.num_tokens == work.num_draws == 1 and sequence.output):
                continue
            if sequence.num_pending:
                self._expect(sequence, plan)
            elif (ask := self._ask(sequence, plan, most)) is not None:
                places.append(place)
                asks.append(ask)
        if asks:
            for place, ask, found in zip(places, asks, self._proposer.propose(asks), strict=True):
                self._add(plan, place, ask, found)

    def _expect(self, sequence: Sequence, plan: StepPlan) -> None:
        """Its last token is in flight. If something will be proposed behind it, the next plan waits for this one."""
        drafting = _drafting(sequence)
        if plan.holds_next or drafting is None:
            return
        wanted = drafting.acceptance.num_wanted(len(sequence.tokens), 1)
        plan.holds_next = wanted > 0 and self._proposer.expects(sequence, drafting)

    def _ask(self, sequence: Sequence, plan: StepPlan, most: int) -> Ask | None:
        drafting = _drafting(sequence)
        if drafting is None:
            return None
        attempt, length = sequence.attempt, len(sequence.tokens)
        # The row draws one token more than it proposes.
        room = min(most, plan.budget, attempt.lease.left, attempt.end_len - length - 1)
        wanted = drafting.acceptance.num_wanted(length, room)
        if self._proposer.needs_blocks and wanted > 0:
            wanted = self._fit(sequence, wanted)
        return Ask(sequence, drafting, wanted) if wanted > 0 else None

    def _add(self, plan: StepPlan, place: int, ask: Ask, found: Seq[int]) -> None:
        sequence, lease = ask.sequence, ask.sequence.attempt.lease
        # What was asked for first may have taken what was there for all.
        number = min(len(found), ask.num_tokens, plan.budget, lease.left)
        number = self._fit(sequence, number)
        if number < 1:
            return
        plan.proposals[sequence] = tuple(found[:number])
        plan.work[place] = Work(sequence, 1 + number, 1 + number)
        plan.budget -= number
        plan.holds_next = True
        lease.in_flight += number

    def _fit(self, sequence: Sequence, number: int) -> int:
        """As many as blocks can be had for."""
        size, first = self._cache.block_size, sequence.num_scheduled + 1
        while len(sequence.block_ids) * size < first + number:
            fresh = self._cache.allocate(1)
            if fresh is None:
                return len(sequence.block_ids) * size - first
            sequence.block_ids += fresh
        return number

    def forget(self, region: bytes | None) -> None:
        self._proposer.forget(region)

    # --- its results ---

    def observe(self, sequence: Sequence, num_proposed: int, num_accepted: int) -> None:
        if sequence.drafting is not None:
            length = len(sequence.tokens)
            sequence.drafting.acceptance.observe(num_proposed, num_accepted, length)


def _drafting(sequence: Sequence) -> Drafting | None:
    """None for a sequence with penalties: they change with every output token, and devices count tokens that are drawn,
    not those that are proposed. Nor for one with a grammar: the masks behind a guess are not known, nor for one with an
    adapter, whose text the model as it is does not foresee."""
    if sequence.automaton is not None or sequence.attempt.message.adapter:
        return None
    if sequence.drafting is None and not penalizes(sequence.attempt.message.sampling):
        sequence.drafting = Drafting()
    return sequence.drafting
