"""The pins of nodes, and the blocks that they keep.

A pin keeps everything up to its node. The number of pins is counted up the path as protectors are counted, so that the
blocks under pins are known without a walk. The module counts; cache/blocks/retention.py decides who may pin how much.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cache.blocks.usage import Usage
from cache.tree.radix import Node


@dataclass(slots=True, eq=False)
class Pin:
    ttl_ms: int
    """Milliseconds of the pin after each use. With 0 it stays until it is lifted."""
    expires_ms: int


class Pins:
    def __init__(self, usage: Usage) -> None:
        self.num_blocks = 0
        """The number of blocks that cannot be evicted because of pins."""
        self._usage = usage
        self._pins: dict[Node, Pin] = {}
        self._covers: dict[Node, int] = {}
        """1 if the node is pinned + the number of children with pins in or below them. Law 10."""
        self.lapsed: set[Node] = set()
        """Nodes that a pin kept until the pin expired. Only this module changes it."""

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, node: Node) -> bool:
        return node in self._pins

    def get(self, node: Node) -> Pin | None:
        return self._pins.get(node)

    def covers(self, node: Node) -> int:
        """Returns 1 if the node is pinned, and 1 more for each child with pins in or below it."""
        return self._covers.get(node, 0)

    def pin(self, node: Node, pin: Pin) -> bool:
        """Pins a node, or replaces its pin. Returns True if it had none. O(nodes above without pins)."""
        is_new = node not in self._pins
        self._pins[node] = pin
        if is_new:
            self._cover(node)
        return is_new

    def lift(self, node: Node, *, lapsed: bool) -> None:
        """Lifts the pin of a node. O(nodes above that lose their last pin)."""
        del self._pins[node]
        self._uncover(node, lapsed=lapsed)

    def _cover(self, node: Node | None) -> None:
        while node is not None:
            self._covers[node] = number = self._covers.get(node, 0) + 1
            if number > 1:
                return
            self.lapsed.discard(node)
            self._count(node, len(node.block_ids))
            node = node.parent

    def _uncover(self, top: Node, *, lapsed: bool) -> None:
        node: Node | None = top
        while node is not None:
            self._covers[node] -= 1
            if self._covers[node]:
                return
            del self._covers[node]
            # The effect of one tenant's pin on public nodes must not show to other tenants.
            if lapsed and node.tenant == top.tenant:
                self.lapsed.add(node)
            self._count(node, -len(node.block_ids))
            node = node.parent

    def _count(self, node: Node, num_blocks: int) -> None:
        self.num_blocks += num_blocks
        self._usage.pin(node.tenant, num_blocks)

    # The tree's changes (cache/blocks/ownership.py).

    def split(self, upper: Node, tail: Node) -> None:
        if tail in self._covers:
            self._covers[upper] = 1
        if tail in self.lapsed:
            self.lapsed.add(upper)

    def removed(self, node: Node) -> None:
        self.lapsed.discard(node)

    def named(self) -> Iterable[Node]:
        """Returns the nodes that the table names (for invariants.py)."""
        return {*self._pins, *self._covers, *self.lapsed}

    def pinned(self) -> Iterable[Node]:
        """Returns the nodes that are pinned themselves."""
        return self._pins.keys()
