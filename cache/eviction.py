"""Who is protected, and who goes first. Knows nodes and their counts; not tokens, not requests.

A node is protected while a handle, a pin or a protected child holds it. Unprotected nodes have only unprotected nodes
below them, so every block of theirs can be reclaimed from the leaves up: `num_evictable` is their plain sum.
"""

from __future__ import annotations

import heapq

from cache.radix import Node
from cache.usage import Usage

Entry = tuple[int, int, int, Node]


class LeafHeap:
    """Evictable leaves, coldest first: by priority, then by last use, then by id, so that runs are deterministic.

    Removing from the middle of a heap is O(n), so an entry is disowned instead (its node points elsewhere) and skipped
    when it surfaces; the heap is rebuilt once stale entries outnumber live ones. Amortised O(log leaves).
    """

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self.num_live = 0

    def push(self, node: Node) -> None:
        assert node.entry is None
        entry = (node.priority, node.last_used, node.id, node)
        node.entry = entry
        self.num_live += 1
        heapq.heappush(self._heap, entry)

    def discard(self, node: Node) -> None:
        if node.entry is None:
            return
        node.entry = None
        self.num_live -= 1
        if len(self._heap) > 2 * self.num_live + 64:
            self._heap = [entry for entry in self._heap if entry[3].entry is entry]
            heapq.heapify(self._heap)

    def coldest(self) -> Node:
        """The leaf to cut next; it stays in the heap, because it may be truncated only."""
        while self._heap[0][3].entry is not self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0][3]

    def entries(self) -> list[Entry]:
        """Live and stale entries (for invariants.py)."""
        return self._heap


class Protection:
    """Protector counts along the path to the root, and the blocks under none: in all and per tenant (law 7)."""

    def __init__(self, usage: Usage) -> None:
        self.usage = usage
        self.leaves = LeafHeap()
        self.num_evictable = 0

    def protect(self, node: Node | None) -> None:
        """One more protector; stops at the first node that had one already. Amortised O(1) on shared prefixes."""
        while node is not None:
            node.num_protectors += 1
            if node.num_protectors > 1:
                return
            self._change(node, held=len(node.block_ids), evictable=-len(node.block_ids))
            self.leaves.discard(node)
            node = node.parent

    def unprotect(self, node: Node | None, now: int) -> list[Node]:
        """The reverse; the moment a node loses its last protector is its last use. Returns the doomed nodes that
        nobody holds any more, for the caller to reclaim."""
        gone: list[Node] = []
        while node is not None:
            assert node.num_protectors > 0
            node.num_protectors -= 1
            if node.num_protectors:
                break
            node.last_used = now
            if node.doomed:
                gone.append(node)
                self._change(node, held=-len(node.block_ids))
            else:
                self._change(node, held=-len(node.block_ids), evictable=len(node.block_ids))
                self.consider(node)
            node = node.parent
        return gone

    def inserted(self, node: Node, num_blocks: int) -> None:
        """That many blocks more in the tree, with the protection their node has now."""
        if node.num_protectors:
            self._change(node, held=num_blocks)
        else:
            self._change(node, evictable=num_blocks)

    def evicted(self, node: Node, num_blocks: int) -> None:
        self._change(node, evictable=-num_blocks)

    def _change(self, node: Node, held: int = 0, evictable: int = 0) -> None:
        if node.parent is not None:  # the root has no blocks and no tenant
            self.num_evictable += evictable
            self.usage.change(node.tenant, held=held, retained=evictable)

    def consider(self, node: Node) -> None:
        """Law 3: each evictable leaf has one live entry. Called wherever a node may just have become one."""
        if (
            node.parent is not None
            and not node.children
            and not node.num_protectors
            and node.entry is None
        ):
            self.leaves.push(node)
