"""Steps between launch and collect: it keeps tickets in order, and measures the device's time as the host sees it.

The module knows the runner and plans, and decides nothing. The caller of `launch` decides how many steps stay in
flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from workers.engine.scheduling.step_plan import StepPlan
from workers.engine.sequences.sequence import Sequence, Status
from workers.engine.speculate.proposer import Outcome
from workers.engine.speculate.verify import moves, own_path
from workers.engine.values.plan import Row, RowResult, SampledToken, StepRunner, Ticket
from workers.engine.values.record import StepRecord


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
        """Copies the plan's blocks. Raises what the runner raises; then the plan still has the copies that were not
        made."""
        while plan.copies:
            number = num_at_once(plan.copies)
            self._runner.copy_blocks(plan.copies[:number])
            plan.copies = plan.copies[number:]  # no later failure undoes the others

    def launch(self, plan: StepPlan, rows: list[Row]) -> None:
        """Launches a plan. Raises what the runner raises; then nothing is in flight for this plan."""
        begun_at = self._clock()
        self.copy(plan)
        ticket = self._runner.launch(rows)
        record = StepRecord(
            plan.step,
            num_seqs=len(rows),
            num_tokens=plan.num_tokens,
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
            flight.own[sequence] = Outcome(proposal, tokens, nodes, result.probed), own
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


def num_at_once(copies: Seq[tuple[int, int]]) -> int:
    """Returns how many of the first copies may be made in any order: each of their targets is named once only."""
    sources, targets = set[int](), set[int]()
    for number, (source, target) in enumerate(copies):
        if source in targets or target in targets or target in sources:
            return number
        sources.add(source)
        targets.add(target)
    return len(copies)
