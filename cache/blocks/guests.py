"""Guest blocks: blocks of the tree that private block tables still name, because forked choices committed one after
another.

The module counts them by node. A node with guests has one more protector; cache/blocks/ownership.py adds and removes it
when the first guest of a node comes and the last one leaves. Such a node is neither cut nor removed. If it is split, all
guests stay with the tail, also those of the front: this protects the front no less, and it protects the tail for as long
as a choice still names a block that it committed with it.
"""

from __future__ import annotations

from collections.abc import Iterable

from cache.tree.radix import Node


class Guests:
    def __init__(self) -> None:
        self._nodes: dict[int, Node] = {}
        """The node of each guest block."""
        self._counts: dict[Node, int] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._nodes

    def num_at(self, node: Node) -> int:
        return self._counts.get(node, 0)

    def enter(self, block: int, node: Node) -> bool:
        """Notes a guest. Returns True if it is the first one of the node."""
        self._nodes[block] = node
        self._counts[node] = number = self._counts.get(node, 0) + 1
        return number == 1

    def leave(self, block: int) -> Node | None:
        """Forgets a guest. Returns its node if it was the last one there."""
        node = self._nodes.pop(block)
        self._counts[node] -= 1
        if self._counts[node]:
            return None
        del self._counts[node]
        return node

    def named(self) -> Iterable[Node]:
        """Returns the nodes that the table names (for invariants.py)."""
        return {*self._nodes.values(), *self._counts}

    def counts(self) -> tuple[dict[int, Node], dict[Node, int]]:
        """Returns the node of each guest, and the number at each node (for invariants.py)."""
        return self._nodes, self._counts
