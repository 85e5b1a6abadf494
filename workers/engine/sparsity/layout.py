"""The block tables of sequences that hold the KV of a part of their tokens. What is kept of such a sequence is here, and
`budget` says which blocks stay. The module is pure.

Blocks that the tree or other tables hold too are copied before the table loses any, because the others were computed
while every token was visible, and go on so.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from workers.engine.scheduling.kv_layout import Fresh, Tables
from workers.engine.scheduling.step_plan import StepPlan
from workers.engine.sequences.sequence import Attempt, Sequence
from workers.engine.sparsity.budget import Sparsity, received
from workers.engine.values.layout import Layout, Thinned
from workers.engine.values.probe import AttentionMass, Probe


@dataclass(slots=True)
class Held:
    """State of one sequence that holds blocks."""

    num_dropped: int = 0
    """Number of computed tokens whose KV it holds no more. They fill whole blocks."""
    mass: list[float] = field(default_factory=list)
    """Attention that its first blocks received, as far as it was measured."""


class SparseLayout:
    def __init__(self, budget: Sparsity) -> None:
        self.budget = budget
        self._held: dict[Sequence, Held] = {}

    def place(self, sequence: Sequence) -> int:
        return sequence.num_scheduled - self.num_dropped(sequence)

    def num_dropped(self, sequence: Sequence) -> int:
        held = self._held.get(sequence)
        return 0 if held is None else held.num_dropped

    def exceeds(self, sequence: Sequence) -> bool:
        """Returns whether it would hold more than the budget with its next token."""
        budget = self.budget
        num_blocks = max(len(sequence.block_ids), self.place(sequence) // budget.block_size + 1)
        return num_blocks > budget.num_blocks and budget.applies(sequence.attempt)

    def thin(self, sequence: Sequence, plan: StepPlan, tables: Tables, fresh: Fresh) -> bool:
        assert not plan.ahead, "blocks change under a step in flight"
        held = self._held.setdefault(sequence, Held())
        num_held, size = len(sequence.block_ids), self.budget.block_size
        is_full = self.place(sequence) == num_held * size
        kept = self.budget.kept(held.mass, num_held, self.budget.num_blocks - is_full)
        if held.num_dropped:
            sequence.block_ids = _turned(sequence.block_ids, kept)
        else:
            taken = fresh(lambda: sum(tables.is_common(sequence, index) for index in kept) + is_full)
            if taken is None:
                return False
            plan.copies += _part(sequence, kept, taken, tables, plan.step)
        held.num_dropped += (num_held - len(kept)) * size
        held.mass = [held.mass[index] for index in kept if index < len(held.mass)]
        return True

    def num_copies(self, attempt: Attempt) -> int:
        return self.budget.num_blocks if self.budget.applies(attempt) else 0

    def forked(self, sequence: Sequence, child: Sequence) -> None:
        if held := self._held.get(sequence):
            self._held[child] = Held(mass=list(held.mass))

    def forget(self, sequence: Sequence) -> None:
        self._held.pop(sequence, None)

    def of_row(self, sequence: Sequence, num_tokens: int) -> tuple[Layout | None, Probe | None]:
        held = self._held.get(sequence)
        is_measured = held is not None and bool(held.mass)
        number = self.budget.num_observed(sequence, num_tokens, is_measured=is_measured)
        layout = Thinned(held.num_dropped) if held is not None and held.num_dropped else None
        return layout, AttentionMass(number) if number else None

    def probed(self, sequence: Sequence, answer: tuple[float, ...]) -> None:
        held = self._held.setdefault(sequence, Held())
        held.mass = received(held.mass, answer)


def _turned(table: list[int], kept: list[int]) -> list[int]:
    """Returns a table in which one block of its own is not kept, but is the one to write to."""
    (gone,) = set(range(len(table))) - set(kept)
    return [*(table[index] for index in kept), table[gone]]


def _part(sequence: Sequence, kept: list[int], fresh: list[int], tables: Tables, step: int) -> list[tuple[int, int]]:
    """Reduces the table to the blocks `kept`, followed by the unused ones of `fresh`. Blocks that others hold too are
    copied to `fresh` ones, and the pairs to be copied are returned. `step` makes the copies."""
    table, left = sequence.block_ids, iter(fresh)
    own = {index: next(left) for index in kept if tables.is_common(sequence, index)}
    mine = [own.get(index, table[index]) for index in kept]
    tables.detach(sequence, [*mine, *left], step)
    return [(table[index], block) for index, block in own.items()]
