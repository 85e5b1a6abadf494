"""Steps between launch and collect: it makes rows from a plan, keeps tickets in order, and measures the device's time
as the host sees it.

The module knows the runner and plans, and decides nothing. The caller of `launch` decides how many steps stay in
flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from workers.engine.scheduling.step_plan import StepPlan, Work
from workers.engine.sequences.sequence import Sequence, Status
from workers.engine.sequences.sparsity import Sparsity
from workers.engine.speculate.proposer import Outcome
from workers.engine.speculate.verify import moves, own_path
from workers.engine.values.plan import PENDING, Row, RowResult, SampledToken, SampleSpec, StepRunner, Ticket
from workers.engine.values.record import StepRecord
from workers.engine.values.token_tree import ROOT, Proposal
from workers.protocol.messages import SamplingParams

_PENDING_TOKENS = (PENDING,)


def row_of(work: Work, proposal: Proposal | None = None, sparsity: Sparsity | None = None) -> Row:
    """Returns the row for a part of a plan that is not `launched` yet."""
    if proposal is not None:
        return _row_with_guesses(work, proposal)
    sequence, num_tokens, num_draws = work
    start, attempt = sequence.num_scheduled, sequence.attempt
    row_id, adapter = sequence.row_id, attempt.adapter
    draws = _draws(sequence, num_draws) if num_draws else ()
    if sequence.num_pending:
        table = sequence.block_ids
        return Row(
            _PENDING_TOKENS, start, table, draws, row_id=row_id, adapter=adapter, wants_hidden=_wants_hidden(sequence)
        )
    end = start + num_tokens
    prompt_logprobs = next_token = -1
    if attempt.wants_prompt_logprobs:
        prompt_logprobs = attempt.message.prompt_logprobs
        next_token = attempt.prompt[end] if end < len(attempt.prompt) else -1
    return Row(
        sequence.tokens[start:end],
        start,
        sequence.block_ids,
        draws,
        prompt_logprobs,
        next_token,
        row_id,
        adapter,
        wants_hidden=_wants_hidden(sequence),
        num_dropped=sequence.num_dropped,
        observes=0 if sparsity is None else sparsity.num_observed(sequence, num_tokens),
    )


def _wants_hidden(sequence: Sequence) -> bool:
    return sequence.drafting is not None and sequence.drafting.wants_hidden


def _row_with_guesses(work: Work, proposal: Proposal) -> Row:
    """Returns a row in which the guesses follow the token drawn last. Each draw has the guesses of its branch in its
    output."""
    sequence, start = work.sequence, work.sequence.num_scheduled
    attempt, num_prompt = sequence.attempt, len(sequence.attempt.prompt)
    bans, mask = attempt.bans, _mask(sequence)
    branches = [proposal.path(node) for node in range(ROOT, len(proposal.tokens))]
    outputs = [[*sequence.output, *branch] if branch else sequence.output for branch in branches]
    draws = tuple(
        SampleSpec(
            attempt.message.sampling,
            sequence.seed,
            num_prompt + len(output),
            attempt.prompt,
            output,
            proposal.masks[place] if proposal.masks else mask,
            () if bans is None else bans.behind(output),
        )
        for place, output in enumerate(outputs)
    )
    tokens = sequence.tokens[start:]
    tokens.extend(proposal.tokens)
    return Row(
        tokens,
        start,
        sequence.block_ids,
        draws,
        num_proposed=len(proposal.tokens),
        row_id=sequence.row_id,
        parents=() if proposal.is_chain else proposal.parents,
        wants_hidden=_wants_hidden(sequence),
    )


def _draws(sequence: Sequence, num_draws: int) -> tuple[SampleSpec, ...]:
    attempt = sequence.attempt
    params, position = attempt.message.sampling, len(sequence.tokens) + sequence.num_pending
    if attempt.search is not None:
        params = SamplingParams(seed=0, temperature=0.0, logprobs=attempt.search.num_offered)
        return (SampleSpec(params, 0, position, attempt.prompt, sequence.output),)
    mask, bans = _mask(sequence), attempt.bans
    if not attempt.unforked:
        banned = () if bans is None else bans.behind(sequence.output)
        return (SampleSpec(params, sequence.seed, position, attempt.prompt, sequence.output, mask, banned),)
    banned = () if bans is None else bans.behind(())
    return tuple(
        SampleSpec(params, seed, position, attempt.prompt, (), mask, banned)
        for seed in attempt.seeds(attempt.unforked[:num_draws])
    )


def _mask(sequence: Sequence) -> bytes | None:
    if sequence.automaton is not None:
        return sequence.automaton.mask
    bans = sequence.attempt.bans
    return None if bans is None else bans.mask


@dataclass(slots=True, eq=False)
class InFlightStep:
    """A launched step."""

    plan: StepPlan
    ticket: Ticket
    record: StepRecord
    begun_at: float
    """Time when the host began to launch it."""
    void: set[Sequence] = field(default_factory=set)
    """Sequences whose rows hold nothing, because they built on a step that failed."""
    results: list[RowResult] = field(default_factory=list)
    own: dict[Sequence, tuple[Outcome, tuple[SampledToken, ...]]] = field(default_factory=dict)
    """Rows with guesses: the outcome of the guesses, and the draws that count."""


class Pipeline:
    def __init__(self, runner: StepRunner, clock: Callable[[], float]) -> None:
        self._runner = runner
        self._clock = clock
        self._flights: deque[InFlightStep] = deque()
        self._free_at = float("-inf")
        """Time when the last results came."""
        self._rested = True
        """Whether the device had nothing to do for lack of requests."""

    def __len__(self) -> int:
        return len(self._flights)

    def copy(self, plan: StepPlan) -> None:
        """Copies the plan's blocks. Raises what the runner raises; then the plan still has its copies."""
        if plan.copies:
            self._runner.copy_blocks(plan.copies)
            plan.copies = []  # no later failure undoes them

    def launch(self, plan: StepPlan, rows: list[Row]) -> None:
        """Launches a plan. Raises what the runner raises; then nothing is in flight for this plan."""
        begun_at = self._clock()
        self.copy(plan)
        ticket = self._runner.launch(rows)
        record = StepRecord(
            plan.step,
            num_seqs=len(rows),
            num_tokens=plan.num_tokens,
            num_batch_tokens=plan.num_batch_tokens,
            num_kv_tokens=plan.num_kv_tokens,
            num_cached_tokens=plan.num_cached_tokens,
            num_preempted=plan.num_preempted,
            planned_at=plan.now,
            plan_s=begun_at - plan.now,
            launched_at=self._clock(),
        )
        if not self._flights and not self._rested:
            record.idle_s = begun_at - self._free_at
        self._rested = False
        self._flights.append(InFlightStep(plan, ticket, record, begun_at))

    def first(self) -> InFlightStep:
        """Returns the oldest step and takes it out of those in flight."""
        return self._flights.popleft()

    def collect(self, flight: InFlightStep) -> None:
        """Waits for the step's results. Raises what the runner raises."""
        flight.results = flight.ticket.collect()
        assert len(flight.results) == len(flight.plan.work), "the runner left out rows"
        self._verify(flight)
        now, record = self._clock(), flight.record
        record.collected_at = now
        record.execute_s = now - max(flight.begun_at, self._free_at)
        self._free_at = now

    def _verify(self, flight: InFlightStep) -> None:
        """Verifies the guesses and moves the KV of the right ones to their slots. A row that nobody wants any more is
        left as it is."""
        moved: list[tuple[int, int]] = []
        for work, result in zip(flight.plan.work, flight.results, strict=True):
            sequence = work.sequence
            proposal = flight.plan.proposals.get(sequence)
            if proposal is None or sequence.status is Status.ENDED:
                continue
            nodes, own = own_path(proposal, result.drawn, sequence.attempt.end_ids)
            tokens = tuple(drawn.token for drawn in result.drawn)
            flight.own[sequence] = Outcome(proposal, tokens, nodes, result.hidden), own
            size, start = self._runner.block_size, sequence.num_computed
            moved += moves(nodes, start, sequence.block_ids, size)
        if moved:
            self._runner.move_tokens(moved)

    def void(self, plan: StepPlan) -> None:
        """Marks the rows that later steps launched for the sequences of a failed plan: they hold nothing."""
        for flight in self._flights:
            flight.void.update(work.sequence for work in plan.work)

    def rest(self) -> None:
        """Notes that there was nothing to plan."""
        self._rested = not self._flights
