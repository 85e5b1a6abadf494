"""Trees from text. They hold the tokens that followed the latest occurrences of the same end, in the sequence's own
text and in its region's. The continuation with the most weight is the trunk, and the remaining nodes go to the other
branches with the most weight.

The module knows what `suffix` knows, and keeps to the same regions. The source of the idea is SuffixDecoding (arXiv
2411.04975).
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator
from typing import NamedTuple

from workers.engine.speculate.ngram import match_length
from workers.engine.speculate.proposer import Ask, Guess
from workers.engine.speculate.suffix import END, LONGEST_MATCH, SuffixProposer, Text
from workers.engine.values.token_tree import ROOT, Grower, Proposal

LEAST_SHARE = 0.15
"""Least share of all votes. A branch with fewer is not worth a token of a step."""


class Vote(NamedTuple):
    text: array[int]
    place: int
    """Index of the token that is voted for next."""
    weight: int
    loops: bool = False
    """Whether the branch itself follows the end of the text, as if the text repeated itself."""

    def token(self, branch: tuple[int, ...]) -> int:
        over = self.place - len(self.text)
        if over < 0:
            return self.text[self.place]
        return branch[over] if self.loops and over < len(branch) else END

    def next(self) -> Vote:
        return self._replace(place=self.place + 1)


class _Branch(NamedTuple):
    """A token that may follow a node. Branches with more weight sort first, then those found first."""

    weight: int
    serial: int
    node: int
    tokens: tuple[int, ...]
    votes: list[Vote]


def grow(votes: list[Vote], num_tokens: int, num_nodes: int) -> Proposal:
    """Returns a tree with branches of at most `num_tokens` tokens and at most `num_nodes` nodes in all."""
    grower, others, total = Grower(num_nodes), list[_Branch](), sum(v.weight for v in votes)
    serial = 0

    def behind(node: int, tokens: tuple[int, ...], supporters: list[Vote]) -> list[_Branch]:
        nonlocal serial
        by_token: dict[int, list[Vote]] = {}
        for vote in supporters if len(tokens) < num_tokens else ():
            if (token := vote.token(tokens)) != END:
                by_token.setdefault(token, []).append(vote.next())
        found = []
        for token, mine in by_token.items():
            serial += 1
            weight = -sum(vote.weight for vote in mine)
            found.append(_Branch(weight, serial, node, (*tokens, token), mine))
        return sorted(found)

    branches = behind(ROOT, (), votes)
    while branches:
        best, *rest = branches
        others += rest
        node = grower.add(best.node, best.tokens[-1])
        branches = [] if node is None else behind(node, best.tokens, best.votes)
    heapq.heapify(others)
    while others and -others[0].weight >= LEAST_SHARE * total:
        best = heapq.heappop(others)
        node = grower.add(best.node, best.tokens[-1])
        if node is None:
            break
        for branch in behind(node, best.tokens, best.votes):
            heapq.heappush(others, branch)
    return grower.grown()


class TreeProposer(SuffixProposer):
    def _one(self, ask: Ask[Text]) -> Guess:
        ask.state.index.extend(ask.sequence.tokens)
        return grow(list(self._votes(ask)), ask.num_tokens, ask.num_nodes)

    def _votes(self, ask: Ask[Text]) -> Iterator[Vote]:
        """Yields the votes of all occurrences. One more matching token weighs as much as four occurrences without it;
        of equal ones the latest is first."""
        tokens, index = ask.sequence.tokens, ask.state.index
        if len(tokens) < 2:
            return
        pair = (tokens[-2], tokens[-1])
        for place in index.places(pair):
            if place != len(tokens) - 1:
                length = match_length(tokens, place, tokens, LONGEST_MATCH)
                yield Vote(tokens, place + 1, 4**length, loops=True)
        if (region := self.region_of(ask.sequence)) is not None:
            tail = tokens[-LONGEST_MATCH:]
            for place in region.places(pair):
                length = match_length(region.tokens, place, tail, LONGEST_MATCH)
                yield Vote(region.tokens, place + 1, 4**length)
