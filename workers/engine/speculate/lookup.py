"""Prompt lookup as a proposer: it proposes the tokens that followed earlier in the sequence's own text."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from workers.engine.sequences.sequence import Sequence
from workers.engine.speculate.ngram import NgramIndex, Room, continuation
from workers.engine.speculate.proposer import Ask, Guess, Proposer


class NgramProposer(Proposer[NgramIndex]):
    """Proposes from the sequence's own prompt and output."""

    def __init__(self) -> None:
        self._room = Room()

    def begin(self) -> NgramIndex:
        return NgramIndex(self._room)

    def begin_plan(self) -> None:
        self._room.refill()

    def propose(self, asks: Seq[Ask[NgramIndex]]) -> list[Guess]:
        return [self._one(ask) for ask in asks]

    def expects(self, sequence: Sequence, state: NgramIndex) -> bool:
        state.extend(sequence.tokens)
        return state.find(sequence.tokens) is not None

    def _one(self, ask: Ask[NgramIndex]) -> Seq[int]:
        tokens, index = ask.sequence.tokens, ask.state
        index.extend(tokens)
        match = index.find(tokens)
        return () if match is None else continuation(tokens, match.place, ask.num_tokens)
