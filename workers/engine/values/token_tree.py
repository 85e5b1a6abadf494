"""Guesses behind the last known token, as a tree: tokens in an order in which a parent comes before its children. A list
is the tree in which each is the parent of the next. Pure.

In a row the last known token stands at place 0 and node i at place i + 1, which is also its slot behind the known
tokens; its position is its depth, and it sees those of its own branch only. Source: tree attention of SpecInfer
(arXiv 2305.09781) and Medusa (arXiv 2401.10774).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

MAX_NODES = 63
"""With the last known token they are the bits of one int64."""
ROOT = -1


class Proposal(NamedTuple):
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    """Of each node; ROOT: the last known token."""
    aim: int | None = None
    """How many tokens would be a full success; None: as many as the longest branch has; 0: nobody counts."""
    masks: tuple[bytes, ...] = ()
    """Of a choice with a grammar: what it allows behind the last known token and behind each node."""

    @classmethod
    def chain(cls, tokens: Iterable[int]) -> Proposal:
        told = tuple(tokens)
        return cls(told, tuple(range(ROOT, len(told) - 1)))

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(ROOT, len(self.tokens) - 1))

    @property
    def depths(self) -> list[int]:
        """Of each node: 1 behind the last known token."""
        found: list[int] = []
        for parent in self.parents:
            found.append(1 if parent == ROOT else found[parent] + 1)
        return found

    @property
    def target(self) -> int:
        return max(self.depths, default=0) if self.aim is None else self.aim

    def path(self, node: int) -> list[int]:
        """Tokens from the first one to the node's own."""
        found = []
        while node != ROOT:
            found.append(self.tokens[node])
            node = self.parents[node]
        return found[::-1]

    def cut(self, number: int) -> Proposal:
        """The first nodes."""
        masks = self.masks[: number + 1]
        return Proposal(self.tokens[:number], self.parents[:number], self.aim, masks)

    def kept(self, masks: Sequence[bytes | None]) -> Proposal:
        """Without the nodes that have no mask; those behind them have none either."""
        tokens: list[int] = []
        parents: list[int] = []
        found: list[bytes] = []
        places = {ROOT: ROOT}
        for node, mask in enumerate(masks, ROOT):
            if mask is None:
                continue
            found.append(mask)
            if node != ROOT:
                places[node] = len(tokens)
                tokens.append(self.tokens[node])
                parents.append(places[self.parents[node]])
        return Proposal(tuple(tokens), tuple(parents), self.aim, tuple(found))

    def trunk(self) -> Proposal:
        """The branch that goes by first children, for who takes no trees."""
        tokens, last = list[int](), ROOT
        for node, parent in enumerate(self.parents):
            if parent == last:
                tokens.append(self.tokens[node])
                last = node
        return Proposal.chain(tokens)

    def follow(self, node: int, token: int) -> int | None:
        """The child of a node that has this token."""
        for child in range(node + 1, len(self.tokens)):
            if self.parents[child] == node and self.tokens[child] == token:
                return child
        return None


NOTHING = Proposal((), ())


def positions(start: int, parents: Sequence[int]) -> list[int]:
    """Of a row's tokens: the last known one, then the nodes."""
    found = [start]
    for parent in parents:
        found.append(found[parent + 1] + 1)
    return found


def views(parents: Sequence[int]) -> list[int]:
    """Which tokens of the row each of them sees: bit i is place i, in a signed 64-bit integer."""
    found = [1]
    for place, parent in enumerate(parents, 1):
        found.append(found[parent + 1] | 1 << place)
    return [bits - (1 << 64) if bits >> 63 else bits for bits in found]


class Grower:
    """A tree under construction; a child with the same token is the same child."""

    def __init__(self, most: int) -> None:
        self._most = min(most, MAX_NODES)
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._children: dict[tuple[int, int], int] = {}

    def add(self, parent: int, token: int) -> int | None:
        """The child's node; None: the tree is full."""
        found = self._children.get((parent, token))
        if found is None and len(self._tokens) < self._most:
            found = self._children[parent, token] = len(self._tokens)
            self._tokens.append(token)
            self._parents.append(parent)
        return found

    def add_path(self, tokens: Iterable[int]) -> list[int]:
        """The nodes of a branch, as far as there is room."""
        nodes: list[int] = []
        for token in tokens:
            node = self.add(nodes[-1] if nodes else ROOT, token)
            if node is None:
                break
            nodes.append(node)
        return nodes

    def grown(self, aim: int | None = None) -> Proposal:
        return Proposal(tuple(self._tokens), tuple(self._parents), aim)
