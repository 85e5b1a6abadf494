"""Beam search. It decides which beams go on, which texts are complete, and when nothing better can come. The module is
pure and knows token ids only.

The rules are those of transformers' `generate(num_beams=...)` with its default `early_stopping=False`. Of the best
continuations over all beams, those that end are complete texts if they are among the best `width`, and the best `width`
of the others go on. The score of a text is the sum of its logprobs divided by its length to the power of
`length_penalty`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from workers.protocol.messages import TokenLogprob, TopLogprob


@dataclass(frozen=True, slots=True)
class Beam:
    """State of a live beam besides its tokens."""

    total: float = 0.0
    """Sum of the logprobs of its output."""
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A complete text, which is not continued."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    score: float
    ended: bool
    """Whether an end token ended it."""


class Extension(NamedTuple):
    """A beam that is extended by one token."""

    parent: int
    """Index of the extended beam among the beams."""
    token: int
    total: float


_total = attrgetter("total")
_score = attrgetter("score")


class BeamSearch:
    """The search of one request. `beams` are in the order of the caller's sequences."""

    def __init__(self, width: int, length_penalty: float, end_ids: frozenset[int], num_logprobs: int = -1) -> None:
        self.width = width
        self.beams = [Beam()]
        self.found: list[Hypothesis] = []
        """The complete texts, the best first, `width` at most."""
        self._length_penalty = length_penalty
        self._end_ids = end_ids
        self._num_logprobs = num_logprobs

    @property
    def num_candidates(self) -> int:
        """Number of candidates to look at. At least `width` of them do not end, whatever ends the others."""
        return max(2, 1 + len(self._end_ids)) * self.width

    @property
    def num_offered(self) -> int:
        """Number of best tokens that each beam must offer."""
        return max(self.num_candidates, self._num_logprobs)

    def advance(
        self, offers: Sequence[Sequence[TopLogprob]], outputs: Sequence[Sequence[int]], *, is_last: bool
    ) -> list[Extension]:
        """Returns the beams that go on, the best first. The list is empty if the search is over. `offers` are the best
        tokens that may follow each beam, and `outputs` the tokens that it has up to now. With `is_last` no text may
        grow further."""
        candidates = (
            Extension(place, offer.token, beam.total + offer.logprob)
            for place, (beam, offer_list) in enumerate(zip(self.beams, offers, strict=True))
            for offer in offer_list[: self.num_candidates]
        )
        ranked = heapq.nlargest(self.num_candidates, candidates, key=_total)
        complete = [e for e in ranked[: self.width] if is_last or e.token in self._end_ids]
        for extension in complete:
            tokens = (*outputs[extension.parent], extension.token)
            beam = self._grown(extension, offers)
            self._complete(beam, tokens, ended=extension.token in self._end_ids)
        kept = [e for e in ranked if e.token not in self._end_ids][: self.width]
        if is_last or self._is_over(kept[0].total, len(outputs[0]) + 1):
            return []
        return kept

    def grow(self, extensions: Sequence[Extension], offers: Sequence[Sequence[TopLogprob]]) -> None:
        """Makes these extensions the beams from now on, in this order."""
        self.beams = [self._grown(extension, offers) for extension in extensions]

    def cut(self, outputs: Sequence[Sequence[int]]) -> None:
        """Ends the search because the budget is used up. The beams count as complete texts as they are."""
        for beam, output in zip(self.beams, outputs, strict=True):
            if output:
                self._complete(beam, tuple(output), ended=False)

    def _grown(self, extension: Extension, offers: Sequence[Sequence[TopLogprob]]) -> Beam:
        parent, offered = self.beams[extension.parent], offers[extension.parent]
        top = tuple(offered[: max(0, self._num_logprobs)])
        own = TokenLogprob(extension.total - parent.total, top)
        return Beam(extension.total, (*parent.logprobs, own))

    def _complete(self, beam: Beam, tokens: tuple[int, ...], *, ended: bool) -> None:
        score = beam.total / len(tokens) ** self._length_penalty
        self.found.append(Hypothesis(tokens, beam.logprobs, score, ended))
        self.found = heapq.nlargest(self.width, self.found, key=_score)

    def _is_over(self, best: float, length: int) -> bool:
        """Says whether the best beam would not be kept even if it were complete now. A longer text of it might be kept:
        this is the same estimate that transformers makes."""
        full = len(self.found) == self.width
        return full and best / length**self._length_penalty <= self.found[-1].score
