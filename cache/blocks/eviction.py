"""Protection and the order of eviction. The module knows nodes and their counts, but neither tokens nor requests.

A node is protected while a handle, a pin or a protected child holds it. Unprotected nodes have only unprotected nodes
below them, so all their blocks can be reclaimed from the leaves up: the number of evictable blocks is their plain sum.
A node has at least the priority of its descendants (law 9) and was used at least as late, so the same holds for nodes
that were used recently.

The order is: tenants above their quota; then all above their floor; then floors. Within each of these it is (priority,
last use, id).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable

from cache.blocks.usage import AT_FLOOR, Reach, Usage
from cache.tree.radix import Node

Entry = tuple[int, int, int, Node]
Top = tuple[int, int, int, int, Node]

INTERACTIVE = 40
"""The lowest priority of nodes that serve interactive requests: output has 40, prompts have 50, or what a request asked
for."""
RECENT_MS = 300_000
"""Milliseconds after its last use for which batch may not evict an interactive node."""


class LeafHeap:
    """Evictable leaves, coldest first: by priority, then by last use, then by id, so that runs are deterministic.

    Removing from the middle of a heap is O(n), so an entry is made stale instead (its node points elsewhere) and
    skipped when it comes to the top. The heap is rebuilt once stale entries outnumber live ones. Amortised O(log
    leaves).
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
        """Return the leaf to cut next. It stays in the heap, because it may be truncated only."""
        while self._heap[0][3].entry is not self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0][3]

    def entries(self) -> list[Entry]:
        """Return live and stale entries (for invariants.py)."""
        return self._heap


class Leaves:
    """One heap of leaves per tenant, and one over the tenants, keyed by (rank, coldest leaf).

    The upper heap is updated only when the coldest leaf is asked for, and only for the tenants that changed since:
    without pressure a change costs an entry in a set. Amortised O(log leaves) per change.
    """

    def __init__(self, rank: Callable[[str], int]) -> None:
        self.heaps: dict[str, LeafHeap] = {}
        self.rank = rank
        self._tops: list[Top] = []
        self._live: dict[str, Top] = {}
        self._changed: set[str] = set()

    def push(self, node: Node) -> None:
        heap = self.heaps.get(node.tenant)
        if heap is None:
            heap = self.heaps[node.tenant] = LeafHeap()
        heap.push(node)
        self._changed.add(node.tenant)

    def discard(self, node: Node) -> None:
        if node.entry is not None:
            self.heaps[node.tenant].discard(node)
            self._changed.add(node.tenant)

    def touch(self, tenant: str) -> None:
        """Note that the tenant's rank may have changed."""
        if tenant in self.heaps:
            self._changed.add(tenant)

    def coldest(self) -> Top | None:
        """Return (rank, priority, last use, id, leaf) of the leaf to go first, or None if there is no leaf."""
        while self._changed:
            self._refresh(self._changed.pop())
        tops, live = self._tops, self._live
        while tops:
            top = tops[0]
            if live.get(top[4].tenant) is top:
                return top
            heapq.heappop(tops)
        return None

    def coldest_of(self, tenant: str) -> Node | None:
        heap = self.heaps.get(tenant)
        return heap.coldest() if heap is not None and heap.num_live else None

    def _refresh(self, tenant: str) -> None:
        leaf = self.coldest_of(tenant)
        if leaf is None:
            self.heaps.pop(tenant, None)
            self._live.pop(tenant, None)
            return
        top = (self.rank(tenant), leaf.priority, leaf.last_used, leaf.id, leaf)
        if self._live.get(tenant) == top:
            return
        self._live[tenant] = top
        heapq.heappush(self._tops, top)
        if len(self._tops) > 2 * len(self._live) + 64:
            self._tops = list(self._live.values())
            heapq.heapify(self._tops)


class Protection:
    """Counts of protectors along the path to the root. Unprotected nodes are counted per tenant (law 7), kept in heaps
    of leaves, and in the order of their last use."""

    def __init__(self, usage: Usage) -> None:
        self.usage = usage
        self.cold = Leaves(usage.rank)
        """Leaves that any request may evict."""
        self.recent = Leaves(usage.rank)
        """Leaves that batch may not evict yet."""
        self.by_use: OrderedDict[Node, None] = OrderedDict()
        """All evictable nodes, the longest unused first: children before parents."""
        self.recent_by_use: OrderedDict[Node, None] = OrderedDict()

    def protect(self, node: Node | None) -> None:
        """Add a protector. It stops at the first node that had one already. Amortised O(1) on shared prefixes."""
        while node is not None:
            node.num_protectors += 1
            if node.num_protectors > 1:
                return
            if node.used_ms:  # it was not inserted just now
                self.usage.counts.reuse_gaps.add(self.usage.now_ms() - node.used_ms, len(node.block_ids))
            self.left(node, held=len(node.block_ids))
            node = node.parent

    def unprotect(self, node: Node | None, step: int) -> list[Node]:
        """Remove a protector. A node that loses its last protector was last used now. Returns the doomed nodes that
        nobody holds any more, for the caller to reclaim."""
        gone: list[Node] = []
        now = self.usage.now_ms()
        while node is not None:
            assert node.num_protectors > 0
            node.num_protectors -= 1
            if node.num_protectors:
                break
            node.last_used, node.used_ms = step, now
            if node.doomed:
                gone.append(node)
                self._count(node, held=-len(node.block_ids))
            else:
                self._entered(node)
            node = node.parent
        return gone

    def inserted(self, node: Node, num_blocks: int) -> None:
        """Count `num_blocks` more in the tree. A node without a protector gets one before anything else happens."""
        if node.num_protectors:
            self._count(node, held=num_blocks)
        else:
            self._count(node, retained=num_blocks)

    def cut(self, node: Node, num_blocks: int) -> None:
        """Count blocks of an unprotected node that left the tree; some of its blocks stay."""
        self._count(node, retained=-num_blocks, recent=-num_blocks if node.is_recent else 0)

    def left(self, node: Node, held: int = 0) -> None:
        """Note that the node is not evictable any more: it is protected, or it left the tree."""
        num_blocks = len(node.block_ids)
        num_recent = 0
        self._leaves(node).discard(node)
        self.by_use.pop(node, None)
        if node.is_recent:
            self.recent_by_use.pop(node, None)
            num_recent, node.is_recent = num_blocks, False
        self._count(node, held=held, retained=-num_blocks, recent=-num_recent)

    def _entered(self, node: Node) -> None:
        if node.parent is None:
            return
        num_blocks = len(node.block_ids)
        node.is_recent = node.priority >= INTERACTIVE
        self.by_use[node] = None
        if node.is_recent:
            self.recent_by_use[node] = None
        self._count(node, held=-num_blocks, retained=num_blocks, recent=num_blocks if node.is_recent else 0)
        self.consider(node)

    def _count(self, node: Node, held: int = 0, retained: int = 0, recent: int = 0) -> None:
        if node.parent is not None:  # the root has no blocks and no tenant
            self.usage.change(node.tenant, held=held, retained=retained, recent=recent)
            self.ranked(node.tenant)

    def ranked(self, tenant: str) -> None:
        """Note that the tenant's blocks or bounds have changed, and so perhaps its rank."""
        self.cold.touch(tenant)
        self.recent.touch(tenant)

    def consider(self, node: Node) -> None:
        """Law 3: each evictable leaf has one live entry. This is called wherever a node may just have become one."""
        if node.parent is not None and not node.children and not node.num_protectors and node.entry is None:
            self._leaves(node).push(node)

    def age(self) -> None:
        """Make recently used nodes cold once RECENT_MS have passed. O(nodes that change)."""
        before = self.usage.now_ms() - RECENT_MS
        while self.recent_by_use:
            node = next(iter(self.recent_by_use))
            if node.used_ms > before:
                return
            del self.recent_by_use[node]
            self.recent.discard(node)
            node.is_recent = False
            self._count(node, recent=-len(node.block_ids))
            self.consider(node)

    def coldest(self, reach: Reach) -> tuple[int, Node]:
        """Return (rank of its tenant, leaf) to be cut next. There must be one within that reach."""
        top, other = self.cold.coldest(), self.recent.coldest() if reach.recent else None
        if top is None or (other is not None and other < top):
            top = other
        assert top is not None
        if top[0] == AT_FLOOR and not reach.floors:
            return AT_FLOOR, self._coldest_behind(reach)
        return top[0], top[4]

    def _coldest_behind(self, reach: Reach) -> Node:
        """Return the coldest leaf below a node within reach that lies above a floor: all leaves are at floors then, and
        the node belongs to a public prompt that is no longer pinned. O(evictable leaves), for as long as there is such
        a prompt."""
        kinds = (self.cold, self.recent) if reach.recent else (self.cold,)
        entries = [e for kind in kinds for heap in kind.heaps.values() for e in heap.entries()]
        return min(e for e in entries if e[3].entry is e and self._hangs(e[3], reach))[3]

    def _hangs(self, leaf: Node, reach: Reach) -> bool:
        node = leaf.parent
        while node is not None and node.parent is not None and not node.num_protectors:
            if self.usage.rank(node.tenant) < AT_FLOOR and (reach.recent or not node.is_recent):
                return True
            node = node.parent
        return False

    def coldest_of(self, tenant: str, reach: Reach) -> Node | None:
        leaves = [self.cold.coldest_of(tenant), self.recent.coldest_of(tenant) if reach.recent else None]
        found = [leaf for leaf in leaves if leaf is not None]
        return min(found, key=lambda n: (n.priority, n.last_used, n.id)) if found else None

    def _leaves(self, node: Node) -> Leaves:
        return self.recent if node.is_recent else self.cold
