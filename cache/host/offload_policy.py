"""What of the tree is worth a copy in the host tier, and when: hit twice, worth much, about to be evicted.

Knows nodes and the tier; not bytes. Blocks to be copied wait here until whoever moves bytes takes them, before anybody
writes to a block again.
"""

from __future__ import annotations

from cache.host.tiers import HostTier, Written
from cache.tree.radix import Node

HITS = 2
WORTHY = 60
"""What was hit so often, or is worth so much, is written to the host."""


class OffloadPolicy:
    """What the tree has to say to the tier: which nodes are worth a copy now."""

    def __init__(self, host: HostTier) -> None:
        self.host = host
        self.num_hits = HITS
        self._written: list[Written] = []

    def hit(self, node: Node | None) -> None:
        """A request found everything up to this node. O(blocks of the path) if some of it is hot."""
        hot = None
        while node is not None and node.parent is not None:
            node.num_hits += 1
            if hot is None and self._is_hot(node) and not node.doomed:
                hot = node
            node = node.parent
        if hot is not None:
            self.write(hot)

    def committed(self, node: Node) -> None:
        """Blocks were inserted there."""
        if node.parent is not None and self._is_hot(node) and not node.doomed:
            self.write(node)

    def leaving(self, leaf: Node) -> None:
        """Some of its blocks are about to be evicted."""
        if leaf.num_offered < len(leaf.block_ids) and self._is_hot(leaf):
            self.write(leaf)

    def _is_hot(self, node: Node) -> bool:
        return node.num_hits >= self.num_hits or node.priority >= WORTHY

    def take(self) -> list[Written]:
        """Blocks to be copied before anybody writes to them again; what was dropped meanwhile is not among them."""
        written, self._written = self._written, []
        return [one for one in written if not one.copy.gone]

    def write(self, node: Node) -> None:
        """Everything up to there."""
        path: list[Node] = []
        one: Node | None = node
        while one is not None and one.parent is not None:
            path.append(one)
            one.num_offered = len(one.block_ids)
            one = one.parent
        self._written += self.host.write(path[::-1])
