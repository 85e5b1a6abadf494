"""Prompt lookup as a proposer: it proposes the tokens that followed earlier in the sequence's own text."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from workers.engine.sequences.drafting import Drafting
from workers.engine.sequences.ngram import continuation
from workers.engine.sequences.sequence import Sequence
from workers.engine.speculate.proposer import Ask, Guess, Proposer


class NgramProposer(Proposer):
    """Proposes from the sequence's own prompt and output."""

    def propose(self, asks: Seq[Ask]) -> list[Guess]:
        return [self._one(ask) for ask in asks]

    def expects(self, sequence: Sequence, drafting: Drafting) -> bool:
        drafting.index.extend(sequence.tokens)
        return drafting.index.find(sequence.tokens) is not None

    def _one(self, ask: Ask) -> Seq[int]:
        tokens, index = ask.sequence.tokens, ask.drafting.index
        index.extend(tokens)
        match = index.find(tokens)
        return () if match is None else continuation(tokens, match.place, ask.num_tokens)
