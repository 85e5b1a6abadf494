"""Interface of a proposer of tokens: what it is asked, what it answers, and what it learns of the outcome.

A proposal may be anything: verification draws from the model at every position, so a wrong one costs time and never
changes a token. A proposer is asked once per step for all sequences, which lets a model of its own run them as one
batch. Each proposal is one-hot: a list or a tree of tokens without probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from workers.engine.sequences.sequence import Sequence
from workers.engine.values.token_tree import Proposal

State = TypeVar("State")
"""State that a proposer keeps of one sequence between two proposals."""


class Ask(NamedTuple, Generic[State]):
    sequence: Sequence
    """The sequence. All its tokens are known, and the last one is without KV."""
    state: State
    num_tokens: int
    """Largest number of tokens wanted in a row; at least 1."""
    num_nodes: int
    """Largest number of nodes of a tree in all; at least `num_tokens`."""


Guess = Seq[int] | Proposal
"""A list, or a tree. A `Proposal` is a tuple and so a sequence too, so code tests for it first."""


class Outcome(NamedTuple):
    """The outcome of a sequence's row in a step."""

    proposal: Proposal
    drawn: tuple[int, ...]
    """Tokens drawn after the last known token and after each node."""
    nodes: tuple[int, ...] = ()
    """Nodes that were right."""
    hidden: Any = None
    """Last hidden states from which the tokens were drawn, for a proposer that needs them."""

    @property
    def last(self) -> int:
        """Index of the draw that gave the sequence's last token."""
        return self.nodes[-1] + 1 if self.nodes else 0


class Proposer(Protocol[State]):
    """A source of proposals. The defaults are those of one that has no KV, needs no hidden states, always expects to
    propose and learns nothing. What it keeps of a sequence is its own matter: the caller holds it, and looks at nothing
    in it."""

    needs_blocks: bool = False
    """Whether it writes KV of its own for what it proposes. Then blocks are taken before it is asked."""
    needs_hidden: bool = False
    """Whether it needs the last hidden states of the rows. Then it learns from every step, not only from those with
    proposals."""

    def begin(self) -> State:
        """Returns the state of a new sequence."""
        ...

    def begin_plan(self) -> None:
        """Hears that another plan begins, before it is asked anything for it."""
        return

    def propose(self, asks: Seq[Ask[State]]) -> list[Guess]:
        """Returns for each ask the tokens that may come next, or nothing if nothing is worth a try."""
        ...

    def expects(self, sequence: Sequence, state: State) -> bool:
        """Returns whether it will probably propose something once the token in flight is known. Then it is worth
        waiting for that token before the next step."""
        return True

    def learn(self, sequence: Sequence, state: State, outcome: Outcome) -> None:
        """Learns from the outcome of a row. The drawn tokens are already appended to the sequence."""
        return

    def forget(self) -> None:
        """Forgets the texts of every namespace region."""
        return
