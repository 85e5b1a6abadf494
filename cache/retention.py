"""What stays and what must go whatever its age: pins and drops, the operator's commands.

Rare and O(pins x depth) or O(nodes); nothing here runs in a step.
"""

from __future__ import annotations

from collections.abc import Iterable

from cache.ownership import Ownership
from cache.radix import Node


class Retention:
    """A pin is one more protector on a node, so its whole path stays and no eviction rule needs to know of it."""

    def __init__(self, owners: Ownership, pin_limit: int) -> None:
        self.pin_limit = pin_limit
        self.pinned: set[Node] = set()
        self._owners = owners

    @property
    def num_blocks(self) -> int:
        """Blocks that cannot be evicted because of pins."""
        return _num_blocks_above(self.pinned)

    def pin(self, node: Node) -> bool:
        """False, and nothing changed, for the root, a dropped node, or beyond the limit."""
        if node.parent is None or node.doomed:
            return False
        if node in self.pinned:
            return True
        if _num_blocks_above([*self.pinned, node]) > self.pin_limit:
            return False
        node.pinned = True
        self.pinned.add(node)
        self._owners.protection.protect(node)
        return True

    def unpin(self, region: bytes) -> int:
        nodes = [node for node in self.pinned if node.region == region]
        self._lift(nodes)
        return len(nodes)

    def drop(self, region: bytes) -> int:
        """Returns the blocks that became free at once."""
        owners = self._owners
        before = owners.pool.num_free
        owners.ghosts.forget(region)
        tops = [
            node
            for node in owners.tree.nodes()
            if node.region == region and node.parent is not None and node.parent.region != region
        ]
        for top in tops:
            held = owners.doom(top)
            self._lift([node for node in held if node.pinned])
        return owners.pool.num_free - before

    def _lift(self, nodes: Iterable[Node]) -> None:
        # By id, not in a set's order: equal runs evict equally.
        for node in sorted(nodes, key=lambda node: node.id):
            node.pinned = False
            self.pinned.remove(node)
            self._owners.unprotect(node)


def _num_blocks_above(nodes: Iterable[Node]) -> int:
    """Blocks on the ways from the root to these nodes, shared ones counted once."""
    covered: set[Node] = set()
    for start in nodes:
        node: Node | None = start
        while node is not None and node not in covered:
            covered.add(node)
            node = node.parent
    return sum(len(node.block_ids) for node in covered)
