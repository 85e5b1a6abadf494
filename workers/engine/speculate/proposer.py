"""What proposes tokens: what it is asked, what it answers, what it learns of the outcome. Values and an interface.

A proposal may be anything: verification draws from the model at every position, so a wrong one costs time and never
changes a token. A proposer is asked once per step for all sequences, which lets a model of its own run them as one
batch. Each proposal is one-hot: a list or a tree of tokens without probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, NamedTuple, Protocol

from workers.engine.sequences.drafting import Drafting
from workers.engine.sequences.sequence import Sequence
from workers.engine.values.token_tree import Proposal


class Ask(NamedTuple):
    sequence: Sequence
    """All its tokens are known, the last one is without KV."""
    drafting: Drafting
    num_tokens: int
    """At most so many are wanted, one behind the other; at least 1."""
    num_nodes: int
    """Of a tree, in all; at least `num_tokens`."""


Guess = Seq[int] | Proposal
"""A list, or a tree. `Proposal` is a sequence too, of two things, so it is asked for first."""


class Outcome(NamedTuple):
    """Of a sequence's row in a step."""

    proposal: Proposal
    drawn: tuple[int, ...]
    """Behind the last known token and behind each node."""
    nodes: tuple[int, ...] = ()
    """Those that were right."""
    hidden: Any = None
    """Last hidden states of the places that were drawn from, for a proposer that needs them."""

    @property
    def last(self) -> int:
        """The place that the sequence's last token was drawn at."""
        return self.nodes[-1] + 1 if self.nodes else 0


class Proposer(Protocol):
    """What is not said otherwise by one who inherits: no KV, no hidden states, always hopeful, nothing to learn."""

    needs_blocks: bool = False
    """It writes KV of its own for what it proposes: blocks are taken before it is asked."""
    needs_hidden: bool = False
    """It is told the last hidden states of the rows, and so of every step, not only of those with proposals."""

    def propose(self, asks: Seq[Ask]) -> list[Guess]:
        """For each ask what may come next, nothing if nothing is worth a try."""
        ...

    def expects(self, sequence: Sequence, drafting: Drafting) -> bool:
        """Whether it will probably propose something once the token in flight is known: then the step behind that one
        is worth waiting for."""
        return True

    def learn(self, sequence: Sequence, drafting: Drafting, outcome: Outcome) -> None:
        """The tokens are the sequence's already."""
        return

    def forget(self, region: bytes | None) -> None:
        """The texts of a namespace region are to be gone; None: those of every region."""
        return
