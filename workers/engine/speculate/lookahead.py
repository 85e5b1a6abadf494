"""Lookahead decoding: proposals without a second model. A window of tokens further on is computed together with the next
token, as if the tokens before it were true. Each step makes its rows a little truer (Jacobi iteration). Sequences of
tokens that occurred in the rows are kept as n-grams, and these are the proposals.

The source is lookahead decoding (arXiv 2402.02057). The window is a tree too: its first level is one branch, and each
column continues after its own token of that level. So it goes through the same verification, and nothing in it is ever
trusted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from workers.engine.sequences.sequence import Sequence
from workers.engine.speculate.proposer import Ask, Guess, Outcome, Proposer
from workers.engine.values.token_tree import Grower, Proposal

LEVELS = 3
"""Number of tokens of an n-gram after its first one, and of rows of the window."""
MOST_GRAMS = 3
"""Largest number of n-grams that are tried in a step."""
KEPT_GRAMS = 8
"""Largest number of n-grams kept for one first token, the latest ones."""
WARM_STEPS = 8
"""Number of first steps in which a window without n-grams does not lower the acceptance rate."""

Gram = tuple[int, ...]


@dataclass(slots=True)
class Window:
    """The window of one sequence. `levels[l][c]` is a guess for the token c + l + 1 positions after the last known
    one."""

    levels: list[list[int]] = field(default_factory=list)
    """The list is empty until something is asked."""
    grams: dict[int, OrderedDict[Gram, None]] = field(default_factory=dict)
    nodes: list[list[int]] = field(default_factory=list)
    """Nodes of each column in the last proposal. The list is empty if there was no space for any."""
    num_steps: int = 0

    def known(self, token: int) -> list[Gram]:
        """Returns the latest n-grams for a first token, latest first."""
        return list(self.grams.get(token, ()))[: -MOST_GRAMS - 1 : -1]

    def keep(self, tokens: Seq[int]) -> None:
        mine = self.grams.setdefault(tokens[0], OrderedDict())
        gram = tuple(tokens[1:])
        mine[gram] = None
        mine.move_to_end(gram)
        if len(mine) > KEPT_GRAMS:
            mine.popitem(last=False)


def first_levels(text: Seq[int], width: int) -> list[list[int]]:
    """Returns the levels of a new window. It may begin with any tokens, so these are tokens of the text."""
    return [[text[(level + column) % len(text)] for column in range(width)] for level in range(LEVELS)]


def draft(window: Window, last: int, num_nodes: int) -> Proposal:
    """Returns a proposal of n-grams that follow the last token, and of the window."""
    grower = Grower(num_nodes)
    grams = window.known(last)
    for gram in grams:
        grower.add_path(gram)
    window.nodes = []
    first = grower.add_path(window.levels[0])
    for column, node in enumerate(first):
        nodes: list[int] = [node]
        for level in range(1, LEVELS):
            below = grower.add(nodes[-1], window.levels[level][column])
            if below is None:
                break
            nodes.append(below)
        if len(nodes) < LEVELS:
            break
        window.nodes.append(nodes)
    waiting = window.num_steps < WARM_STEPS
    return grower.grown(LEVELS if grams else 0 if waiting else 1)


def advance(window: Window, drawn: Seq[int], nodes: Seq[int]) -> None:
    """Moves the window on. The draws after the window's last level are its new last level. `nodes` were right, so as
    many columns are in the past."""
    window.num_steps += 1
    width = len(window.levels[0])
    if not window.nodes:
        return
    fresh = [drawn[column[-1] + 1] for column in window.nodes]
    for place, token in enumerate(fresh):
        window.keep([*(level[place] for level in window.levels), token])
    fresh += window.levels[-1][len(fresh) :]
    levels = [*window.levels[1:], fresh]
    gone = min(len(nodes), width - 1)
    window.levels = [level[gone:] + level[:gone] for level in levels]


class LookaheadProposer(Proposer[Window]):
    def begin(self) -> Window:
        return Window()

    def propose(self, asks: Seq[Ask[Window]]) -> list[Guess]:
        return [self._one(ask) for ask in asks]

    def _one(self, ask: Ask[Window]) -> Guess:
        tokens, window = ask.sequence.tokens, ask.state
        width = max(1, (ask.num_nodes - MOST_GRAMS * LEVELS) // LEVELS)
        if not window.levels:
            window.levels = first_levels(tokens, width)
        return draft(window, tokens[-1], ask.num_nodes)

    def learn(self, sequence: Sequence, state: Window, outcome: Outcome) -> None:
        if not outcome.proposal.tokens:
            return
        window, drawn, size = state, outcome.drawn, len(outcome.proposal.tokens)
        window.nodes = [nodes for nodes in window.nodes if nodes[-1] < size]  # the proposal may have been cut
        advance(window, drawn, outcome.nodes)
        if len(sequence.output) > LEVELS:
            window.keep(sequence.output[-LEVELS - 1 :])
