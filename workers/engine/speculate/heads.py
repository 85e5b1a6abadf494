"""Proposals from heads that look ahead (model/heads.py). The likeliest tokens of the heads, as if the heads did not
depend on each other, make a tree. The heads are Medusa's (arXiv 2401.10774). EAGLE's, which read hidden states too, fit
the same interface (`needs_hidden`, `learn`)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

from workers.engine.sequences.sequence import Sequence
from workers.engine.speculate.proposer import Ask, Guess, Outcome, Proposer
from workers.engine.values.token_tree import ROOT, Grower, Proposal


class Guesser(Protocol):
    def best(self, states: Seq[Any]) -> list[list[list[tuple[int, float]]]]:
        """Returns the best tokens and their log-probabilities per hidden state and head, best first."""
        ...


def grow(best: Seq[Seq[tuple[int, float]]], num_tokens: int, num_nodes: int) -> Proposal:
    """Returns a tree of guesses. `best` has for each head its best tokens and their log-probabilities, best first. The
    trunk takes the first token of each head, and the remaining nodes go to the likeliest branches."""
    best = best[:num_tokens]
    grower = Grower(num_nodes)
    grower.add_path(head[0][0] for head in best)
    waiting = [(-logprob, ROOT, 0, rank) for rank, (_, logprob) in enumerate(best[0])]
    heapq.heapify(waiting)
    while waiting:
        cost, parent, depth, rank = heapq.heappop(waiting)
        node = grower.add(parent, best[depth][rank][0])
        if node is None:
            break
        if depth + 1 < len(best):
            for rank, (_, logprob) in enumerate(best[depth + 1]):
                heapq.heappush(waiting, (cost - logprob, node, depth + 1, rank))
    return grower.grown()


@dataclass(slots=True)
class Seen:
    """State of one sequence: the hidden state from which its last token was drawn."""

    num_tokens: int = -1
    """Length of the sequence with that token."""
    hidden: Any = None


class HeadsProposer(Proposer[Seen]):
    needs_hidden = True

    def __init__(self, heads: Guesser) -> None:
        self._heads = heads

    def begin(self) -> Seen:
        return Seen()

    def propose(self, asks: Seq[Ask[Seen]]) -> list[Guess]:
        """Proposes a tree where the hidden state is known from which the last token was drawn."""
        found: list[Guess] = [() for _ in asks]
        known = [
            (place, ask, ask.state.hidden)
            for place, ask in enumerate(asks)
            if ask.state.num_tokens == len(ask.sequence.tokens)
        ]
        if known:
            guesses = self._heads.best([hidden for _, _, hidden in known])
            for (place, ask, _), best in zip(known, guesses, strict=True):
                found[place] = grow(best, ask.num_tokens, ask.num_nodes)
        return found

    def learn(self, sequence: Sequence, state: Seen, outcome: Outcome) -> None:
        if outcome.hidden is not None:
            state.num_tokens, state.hidden = len(sequence.tokens), outcome.hidden[outcome.last]
