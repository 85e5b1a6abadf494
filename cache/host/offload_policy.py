"""The policy of copies in the host tier: a node that was hit twice or has a high priority is copied, at the latest
before it is evicted.

The module knows nodes and the tier, but no bytes. Blocks to be copied wait here until the mover of bytes takes them,
before anybody writes to a block again.
"""

from __future__ import annotations

from cache.host.tiers import HostTier, Written
from cache.tree.radix import Node

HITS = 2
WORTHY = 60
"""The least number of hits, and the least priority, with which a node is written to the host tier."""


class OffloadPolicy:
    """Finds the tree nodes that deserve a copy in the host tier now."""

    def __init__(self, host: HostTier) -> None:
        self.host = host
        self.num_hits = HITS
        self._written: list[Written] = []

    def hit(self, node: Node | None) -> None:
        """Count a request that found everything up to this node. O(blocks of the path) if some of it is hot."""
        hot = None
        while node is not None and node.parent is not None:
            node.num_hits += 1
            if hot is None and self._is_hot(node) and not node.doomed:
                hot = node
            node = node.parent
        if hot is not None:
            self.write(hot)

    def committed(self, node: Node) -> None:
        """Handle blocks that were inserted at this node."""
        if node.parent is not None and self._is_hot(node) and not node.doomed:
            self.write(node)

    def leaving(self, leaf: Node) -> None:
        """Handle a leaf of which some blocks are about to be evicted."""
        if leaf.num_offered < len(leaf.block_ids) and self._is_hot(leaf):
            self.write(leaf)

    def _is_hot(self, node: Node) -> bool:
        return node.num_hits >= self.num_hits or node.priority >= WORTHY

    def take(self) -> list[Written]:
        """Return blocks to be copied before anybody writes to them again. Copies that were dropped meanwhile are left
        out."""
        written, self._written = self._written, []
        return [one for one in written if not one.copy.gone]

    def write(self, node: Node) -> None:
        """Write everything up to this node."""
        path: list[Node] = []
        one: Node | None = node
        while one is not None and one.parent is not None:
            path.append(one)
            one.num_offered = len(one.block_ids)
            one = one.parent
        self._written += self.host.write(path[::-1])
