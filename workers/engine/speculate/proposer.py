"""What proposes tokens, and what is remembered of a sequence between two proposals. Values and an interface.

A proposal may be anything: verification draws from the model at every position, so a wrong one costs time and never
changes a token. A proposer is asked once per step for all sequences, which lets a model of its own run them as one
batch. Each proposal is one-hot: a list of tokens without probabilities. A proposer with several heads (Medusa, EAGLE)
answers with the best token of each head in order; one that grows a tree answers with the branch it trusts most.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from workers.engine.sequence import Sequence
from workers.engine.speculate.acceptance import Acceptance
from workers.engine.speculate.ngram import NgramIndex

if TYPE_CHECKING:
    from cache.prefix_cache import Handle


class Drafting:
    """What speculation knows of one sequence."""

    __slots__ = ("acceptance", "index", "num_taught", "read")

    def __init__(self) -> None:
        self.acceptance = Acceptance()
        self.index = NgramIndex()
        self.num_taught = 0
        """Tokens that its region's index has seen."""
        self.read = Read()


@dataclass(slots=True)
class Read:
    """What a draft model has KV of: these tokens, in these blocks."""

    handle: Handle | None = None
    tokens: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)

    def num_valid(self, sequence: Sequence, block_size: int) -> int:
        """Positions from the start that still hold. A sequence that lost its blocks has another handle now."""
        if self.handle is not sequence.handle:
            return 0
        blocks = _common(self.block_ids, sequence.block_ids) * block_size
        return min(blocks, _common(self.tokens, sequence.tokens))


def _common(one: Seq[int], other: Seq[int]) -> int:
    """Length of the common beginning."""
    number = min(len(one), len(other))
    if list(one[:number]) == list(other[:number]):
        return number
    return next(i for i in range(number) if one[i] != other[i])


class Ask(NamedTuple):
    sequence: Sequence
    """All its tokens are known, the last one is without KV."""
    drafting: Drafting
    num_tokens: int
    """At most so many are wanted; at least 1."""


class Proposer(Protocol):
    needs_blocks: bool
    """It writes KV of its own for what it proposes: blocks are taken before it is asked."""

    def propose(self, asks: Seq[Ask]) -> list[Seq[int]]:
        """For each ask the tokens that may come next, none if nothing is worth a try."""
        ...

    def expects(self, sequence: Sequence, drafting: Drafting) -> bool:
        """Whether it will probably propose something once the token in flight is known: then the step behind that one
        is worth waiting for."""
        ...

    def forget(self, region: bytes | None) -> None:
        """The texts of a namespace region are to be gone; None: those of every region."""
        ...
