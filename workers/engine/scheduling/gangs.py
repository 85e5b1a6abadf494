"""Gang scheduling (Ousterhout 1982): the sequences of some attempts are in a step all together or not at all. Beams are
such sequences, because which of them go on is decided over all. The module is pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

from workers.engine.scheduling.growth import Growth
from workers.engine.scheduling.step_plan import StepPlan, Work
from workers.engine.sequences.sequence import Attempt, Sequence, Status


def decode(plan: StepPlan, attempt: Attempt, growth: Growth) -> None:
    """Adds a decode for each sequence of a gang, or for none. The next plan needs their results."""
    gang = attempt.sequences
    if not _is_ready(attempt):
        return
    if len(gang) > plan.budget and plan.work:
        return
    needing = [sequence for sequence in gang if growth.is_due(sequence)]
    if needing and not growth.take(needing, plan):
        return
    plan.holds_next = True
    attempt.lease.in_flight += len(gang)
    plan.budget = max(0, plan.budget - len(gang))
    plan.work += [Work(sequence, 1, 1) for sequence in gang]


def next_width(running: Iterable[Sequence]) -> int:
    """Returns the number of sequences of the gang whose turn to decode is next, or 0 if it is a single sequence's."""
    able = (s for s in running if s.decoding and not s.restoring and not s.attempt.at_bound)
    ready = (s for s in able if not s.attempt.gang or (s is s.attempt.sequences[0] and _is_ready(s.attempt)))
    first = min(ready, key=attrgetter("last_step"), default=None)
    return len(first.attempt.sequences) if first is not None and first.attempt.gang else 0


def _is_ready(attempt: Attempt) -> bool:
    """Returns whether a gang can decode. After a preemption it cannot until the last sequence is where it was."""
    return all(s.status is Status.RUNNING and s.decoding and not s.restoring for s in attempt.sequences)


def num_blocks_of_others(sequence: Sequence, block_size: int) -> int:
    """Returns the number of blocks for those of its gang that come back after this sequence, if they share nothing."""
    if not sequence.in_gang:
        return 0
    others = [s for s in sequence.attempt.sequences if s.handle is None and s is not sequence]
    return sum(-(-len(other.tokens) // block_size) for other in others)
