"""Guessed tokens that follow the last known token, as a tree. The tokens are in an order in which a parent comes before
its children. A list is the tree in which each token is the parent of the next. The module is pure.

In a row the last known token has index 0 and node i has index i + 1, which is also its slot offset from the last known
token. A node's position is given by its depth, and it sees only the tokens of its own branch. The source is tree
attention of SpecInfer (arXiv 2305.09781) and Medusa (arXiv 2401.10774).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

MAX_NODES = 63
"""Largest number of nodes. Together with the last known token they are the bits of one int64."""
ROOT = -1


class Proposal(NamedTuple):
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    """Parent of each node. ROOT stands for the last known token."""
    aim: int | None = None
    """Number of tokens that would be a full success. None means as many as the longest branch has; 0 means that the
    success is not counted."""
    masks: tuple[bytes, ...] = ()
    """Token masks of a choice with a grammar: what the grammar allows after the last known token and after each
    node."""

    @classmethod
    def chain(cls, tokens: Iterable[int]) -> Proposal:
        told = tuple(tokens)
        return cls(told, tuple(range(ROOT, len(told) - 1)))

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(ROOT, len(self.tokens) - 1))

    @property
    def depths(self) -> list[int]:
        """Depth of each node. A node that follows the last known token has depth 1."""
        found: list[int] = []
        for parent in self.parents:
            found.append(1 if parent == ROOT else found[parent] + 1)
        return found

    @property
    def target(self) -> int:
        return max(self.depths, default=0) if self.aim is None else self.aim

    def path(self, node: int) -> list[int]:
        """Returns the tokens of the branch from its first one to the node's own."""
        found = []
        while node != ROOT:
            found.append(self.tokens[node])
            node = self.parents[node]
        return found[::-1]

    def cut(self, number: int) -> Proposal:
        """Returns a proposal of the first `number` nodes."""
        masks = self.masks[: number + 1]
        return Proposal(self.tokens[:number], self.parents[:number], self.aim, masks)

    def kept(self, masks: Sequence[bytes | None]) -> Proposal:
        """Returns the proposal without the nodes that have no mask. The nodes below those have no mask either. The
        first mask belongs to the last known token."""
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
        """Returns the branch of first children as a list, for a runner that takes no trees."""
        tokens, last = list[int](), ROOT
        for node, parent in enumerate(self.parents):
            if parent == last:
                tokens.append(self.tokens[node])
                last = node
        return Proposal.chain(tokens)

    def follow(self, node: int, token: int) -> int | None:
        """Returns the child of a node that has this token, or None."""
        for child in range(node + 1, len(self.tokens)):
            if self.parents[child] == node and self.tokens[child] == token:
                return child
        return None


NOTHING = Proposal((), ())


def positions(start: int, parents: Sequence[int]) -> list[int]:
    """Returns the positions of a row's tokens: the last known one, then the nodes."""
    found = [start]
    for parent in parents:
        found.append(found[parent + 1] + 1)
    return found


def views(parents: Sequence[int]) -> list[int]:
    """Returns which tokens of the row each of them sees. Bit i of the signed 64-bit integer is the token with index
    i."""
    found = [1]
    for place, parent in enumerate(parents, 1):
        found.append(found[parent + 1] | 1 << place)
    return [bits - (1 << 64) if bits >> 63 else bits for bits in found]


class Grower:
    """A tree under construction. A child with the same token as an existing child is that child."""

    def __init__(self, most: int) -> None:
        self._most = min(most, MAX_NODES)
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._children: dict[tuple[int, int], int] = {}

    def add(self, parent: int, token: int) -> int | None:
        """Adds a child and returns its node. Returns None if the tree is full."""
        found = self._children.get((parent, token))
        if found is None and len(self._tokens) < self._most:
            found = self._children[parent, token] = len(self._tokens)
            self._tokens.append(token)
            self._parents.append(parent)
        return found

    def add_path(self, tokens: Iterable[int]) -> list[int]:
        """Adds a branch and returns its nodes. The list ends early if the tree is full."""
        nodes: list[int] = []
        for token in tokens:
            node = self.add(nodes[-1] if nodes else ROOT, token)
            if node is None:
                break
            nodes.append(node)
        return nodes

    def grown(self, aim: int | None = None) -> Proposal:
        return Proposal(tuple(self._tokens), tuple(self._parents), aim)
