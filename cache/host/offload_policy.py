"""The policy of copies in the host tier: a node that was hit twice or has a high priority is copied, at the latest
before it is evicted.

The module knows nodes and the tier, but no bytes. It counts the hits of each node, and how many of its blocks were
offered to the tier. Blocks to be copied wait here until the mover of bytes takes them, before anybody writes to a block
again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cache.host.tiers import HostTier, Written
from cache.tree.radix import Node

HITS = 2
WORTHY = 60
"""The least number of hits, and the least priority, with which a node is written to the host tier."""


class OffloadPolicy:
    """Finds the tree nodes that deserve a copy in the host tier now."""

    def __init__(self, host: HostTier, priority_of: Callable[[Node], int]) -> None:
        self.host = host
        self.num_hits = HITS
        self._priority_of = priority_of
        self._hits: dict[Node, int] = {}
        """The number of requests that found the node."""
        self._offered: dict[Node, int] = {}
        """The number of blocks, from the front of the edge, that were offered to the host tier."""
        self._written: list[Written] = []

    def hit(self, node: Node | None) -> None:
        """Counts a request that found everything up to this node. O(blocks of the path) if some of it is hot."""
        hot = None
        while node is not None and node.parent is not None:
            self._hits[node] = self._hits.get(node, 0) + 1
            if hot is None and self._is_hot(node):
                hot = node
            node = node.parent
        if hot is not None:
            self.write(hot)

    def committed(self, node: Node) -> None:
        """Handles blocks that were inserted at this node."""
        if node.parent is not None and self._is_hot(node):
            self.write(node)

    def leaving(self, leaf: Node) -> None:
        """Handles a leaf of which some blocks are about to be evicted."""
        if self.num_offered(leaf) < len(leaf.block_ids) and self._is_hot(leaf):
            self.write(leaf)

    def num_offered(self, node: Node) -> int:
        return self._offered.get(node, 0)

    def _is_hot(self, node: Node) -> bool:
        return self._hits.get(node, 0) >= self.num_hits or self._priority_of(node) >= WORTHY

    def take(self) -> list[Written]:
        """Returns blocks to be copied before anybody writes to them again. Copies that were dropped meanwhile are left
        out."""
        written, self._written = self._written, []
        return [one for one in written if not one.copy.gone]

    def write(self, node: Node) -> None:
        """Writes everything up to this node."""
        path: list[Node] = []
        one: Node | None = node
        while one is not None and one.parent is not None:
            path.append(one)
            self._offered[one] = len(one.block_ids)
            one = one.parent
        self._written += self.host.write(path[::-1])

    # The tree's changes (cache/blocks/ownership.py).

    def split(self, upper: Node, tail: Node) -> None:
        if hits := self._hits.get(tail):
            self._hits[upper] = hits
        if offered := self._offered.pop(tail, 0):
            self._offered[upper] = min(offered, len(upper.block_ids))
            if offered > len(upper.block_ids):
                self._offered[tail] = offered - len(upper.block_ids)

    def cut(self, node: Node) -> None:
        if self.num_offered(node) > len(node.block_ids):
            self._offered[node] = len(node.block_ids)

    def removed(self, node: Node) -> None:
        self._hits.pop(node, None)
        self._offered.pop(node, None)

    def named(self) -> Iterable[Node]:
        """Returns the nodes that the tables name (for invariants.py)."""
        return {*self._hits, *self._offered}
