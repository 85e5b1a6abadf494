"""Use of blocks by running sequences: the blocks that choices of one request save by sharing, and the slots that hold a
token. The module is pure and reads running sequences.

The figures are computed per request. Blocks that different requests share through the prefix tree count for each of
them, among held and unshared blocks alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from workers.engine.sequences.sequence import Attempt, Sequence

Mode = Literal["parallel", "beam"]
NumDropped = Callable[[Sequence], int]


@dataclass(slots=True)
class Shared:
    """Blocks of requests that have several choices."""

    num_held: int = 0
    num_unshared: int = 0
    """Number of blocks that they would hold if each choice had its own."""


@dataclass(slots=True)
class Occupancy:
    shared: dict[Mode, Shared] = field(default_factory=lambda: {"parallel": Shared(), "beam": Shared()})
    num_slots: int = 0
    """Number of slots of the blocks in the tables of running sequences."""
    num_used: int = 0
    """Number of these slots that hold a token."""


def occupancy(running: Iterable[Sequence], block_size: int, num_dropped: NumDropped) -> Occupancy:
    """Returns the figures of the running sequences. `num_dropped` says how many of its computed tokens a sequence holds
    no KV of. O(running)."""
    found = Occupancy()
    requests: dict[Attempt, list[Sequence]] = {}
    for sequence in running:
        requests.setdefault(sequence.attempt, []).append(sequence)
    for attempt, sequences in requests.items():
        num_held = attempt.held.number
        found.num_slots += num_held * block_size
        found.num_used += num_held * block_size - _num_empty(sequences, block_size, num_dropped)
        if attempt.message.num_choices > 1 and attempt.drawn:
            shared = found.shared["beam" if attempt.gang else "parallel"]
            shared.num_held += num_held
            shared.num_unshared += sum(len(sequence.block_ids) for sequence in sequences)
    return found


def _num_empty(sequences: list[Sequence], block_size: int, num_dropped: NumDropped) -> int:
    """Returns the number of empty slots after each sequence's last token. A tail that choices share counts once, with
    the slots that its fullest choice leaves empty."""
    empty: dict[int, int] = {}
    for sequence in sequences:
        num_held = sequence.num_computed - num_dropped(sequence)
        left = len(sequence.block_ids) * block_size - num_held
        last = sequence.block_ids[-1]
        empty[last] = min(left, empty.get(last, left))
    return sum(empty.values())
