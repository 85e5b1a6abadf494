"""Choice of the sequences of a plan that get proposals, and how many. It decides from values, and works with the
proposer and the cache.

Proposals use what is left over of the step's token budget, of the lease and of blocks that are free or cold. Nobody is
preempted for them. A plan with proposals is collected before the next one is made, because that one builds on how many
were right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cache.blocks.usage import COLD
from cache.prefix_cache import PrefixCache
from workers.engine.scheduling.step_plan import StepPlan, Work
from workers.engine.sequences.sequence import Sequence
from workers.engine.speculate.acceptance import Acceptance
from workers.engine.speculate.proposer import Ask, Guess, Outcome, Proposer
from workers.engine.values.plan import RowResult
from workers.engine.values.probe import HiddenStates, Probe
from workers.engine.values.sampling_params import penalizes
from workers.engine.values.token_tree import MAX_NODES, NOTHING, Proposal


@dataclass(slots=True)
class Drafting:
    """State of one sequence, once proposals for it were tried."""

    acceptance: Acceptance
    state: Any
    """The proposer's own state."""


class Speculation:
    def __init__(
        self,
        proposer: Proposer[Any],
        cache: PrefixCache,
        *,
        max_proposals: int = 8,
        max_step_tokens: int = 128,
        takes_trees: bool = True,
        counts_guesses: bool = False,
    ) -> None:
        """Creates the part of the scheduler that adds proposals. `max_proposals` is the largest number of tree nodes
        for one sequence in a step. `max_step_tokens` bounds the rows of a plan times the tokens of each; above it a
        step is bound by arithmetic, and proposals are no longer nearly free. Without `takes_trees` only a tree's trunk
        is tried. With `counts_guesses` the penalties of a row's draws count the guesses before them; without it
        penalized requests get no proposals."""
        self._proposer = proposer
        self._cache = cache
        self._max_proposals = max_proposals
        self._max_step_tokens = max_step_tokens
        self._takes_trees = takes_trees
        self._counts_guesses = counts_guesses
        self._draftings: dict[Sequence, Drafting] = {}
        self._probe = HiddenStates() if proposer.needs_hidden else None
        """Probe that the proposer needs of every step, with proposals or without. Other proposers learn only from steps with
        proposals."""

    # --- proposals for a complete plan ---

    def extend(self, plan: StepPlan) -> None:
        """Extends decode rows by the tokens that are proposed for them."""
        if not plan.work:
            return
        self._proposer.begin_plan()
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
            elif sequence.num_scheduled > sequence.num_computed:
                continue  # it was preempted, and a chunk of its tokens is in flight
            elif (ask := self._ask(sequence, plan, most)) is not None:
                places.append(place)
                asks.append(ask)
        if asks:
            for place, ask, found in zip(places, asks, self._proposer.propose(asks), strict=True):
                if found:
                    self._add(plan, place, ask, found)

    def _expect(self, sequence: Sequence, plan: StepPlan) -> None:
        """Handles a sequence whose last token is in flight. If a proposal for the tokens after it is expected, the next
        plan waits for this one."""
        drafting = self._drafting(sequence)
        if plan.holds_next or drafting is None:
            return
        wanted = drafting.acceptance.num_wanted(len(sequence.tokens), 1)
        plan.holds_next = wanted > 0 and self._proposer.expects(sequence, drafting.state)

    def _ask(self, sequence: Sequence, plan: StepPlan, most: int) -> Ask[Any] | None:
        drafting = self._drafting(sequence)
        if drafting is None:
            return None
        attempt, length = sequence.attempt, len(sequence.tokens)
        wanted = drafting.acceptance.num_wanted(length, most)
        if not wanted:
            return None
        # The row draws one token more than it proposes.
        room = min(most, plan.budget, attempt.lease.left, attempt.end_len - length - 1)
        wanted = min(wanted, room)
        if self._proposer.needs_blocks and wanted > 0:
            wanted = self._fit(sequence, wanted)
        return Ask(sequence, drafting.state, wanted, room) if wanted > 0 else None

    def _add(self, plan: StepPlan, place: int, ask: Ask[Any], found: Guess) -> None:
        sequence, lease = ask.sequence, ask.sequence.attempt.lease
        # Earlier proposals of this plan may have taken budget, lease or blocks that this ask was computed with.
        proposal = self._shaped(found, ask)
        if sequence.automaton is not None:
            masks = sequence.automaton.tree_masks(proposal.tokens, proposal.parents)
            proposal = proposal.kept(masks)
        number = min(len(proposal.tokens), plan.budget, lease.left)
        number = self._fit(sequence, number)
        if number < 1:
            return
        plan.proposals[sequence] = proposal.cut(number)
        plan.work[place] = Work(sequence, 1 + number, 1 + number)
        plan.budget -= number
        plan.holds_next = True
        lease.in_flight += number

    def _shaped(self, found: Guess, ask: Ask[Any]) -> Proposal:
        if not isinstance(found, Proposal):
            return Proposal.chain(found[: ask.num_tokens])
        if self._takes_trees:
            return found.cut(min(ask.num_nodes, MAX_NODES))
        return found.trunk().cut(ask.num_tokens)

    def _fit(self, sequence: Sequence, number: int) -> int:
        """Returns how many of `number` tokens have blocks, after taking as many blocks as there are. No guess
        is worth a block that a chat used recently."""
        size, first = self._cache.block_size, sequence.num_scheduled + 1
        while len(sequence.block_ids) * size < first + number:
            fresh = self._cache.allocate(1, reach=COLD, needed_by=sequence.attempt.message.tenant)
            if fresh is None:
                return len(sequence.block_ids) * size - first
            sequence.block_ids += fresh
            sequence.attempt.held.append(fresh[0])
        return number

    def _drafting(self, sequence: Sequence) -> Drafting | None:
        """Returns the sequence's speculation state. The result is None for a sequence with an adapter, because the base
        model does not foresee its text, and for a gang, which draws together. Device rows count the tokens that are
        drawn, so it is None also for a sequence with penalties where guesses are not counted."""
        if (known := self._draftings.get(sequence)) is not None:
            return known
        attempt = sequence.attempt
        if attempt.message.adapter or attempt.gang:
            return None
        if not self._counts_guesses and penalizes(attempt.message.sampling):
            return None
        new = self._draftings[sequence] = Drafting(Acceptance(), self._proposer.begin())
        return new

    def leave(self, sequence: Sequence) -> None:
        """Forgets a sequence that ended."""
        self._draftings.pop(sequence, None)

    def forget(self) -> None:
        self._proposer.forget()

    # --- the results of a plan ---

    def observe(self, sequence: Sequence, outcome: Outcome) -> None:
        """Learns from the outcome of a step. A tree is measured by its longest branch, because only one branch can be
        right."""
        drafting = self._draftings.get(sequence)
        if drafting is None:
            return
        if outcome.proposal.tokens and (target := outcome.proposal.target):
            num_right = min(len(outcome.nodes), target)
            drafting.acceptance.observe(target, num_right, len(sequence.tokens))
        self._proposer.learn(sequence, drafting.state, outcome)

    def probe(self, sequence: Sequence) -> Probe | None:
        """Returns what the proposer asks of a row of this sequence."""
        return self._probe if sequence in self._draftings else None

    def decoded(self, sequence: Sequence, result: RowResult) -> None:
        """Learns from a decode row without proposals, if the proposer asked something of it."""
        if self._probe is not None and sequence in self._draftings:
            self.observe(sequence, Outcome(NOTHING, (result.drawn[0].token,), hidden=result.probed))
