"""Protection and the order of eviction. The module knows nodes and what holds them, but neither tokens nor requests.

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
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from cache.blocks.usage import AT_FLOOR, Reach, Usage
from cache.tree.radix import Node

Entry = tuple[int, int, int, Node]
"""(priority, last use, id, leaf): the smallest is the coldest."""
Top = tuple[int, int, int, int, Node]
"""(rank of the tenant, priority, last use, id, leaf)."""

INTERACTIVE = 40
"""The lowest priority of nodes that serve interactive requests: output has 40, prompts have 50, or what a request asked
for."""
RECENT_MS = 300_000
"""Milliseconds after its last use for which batch may not evict an interactive node."""


class LeafHeap:
    """Evictable leaves, coldest first: by priority, then by last use, then by id, so that runs are deterministic.

    Removing from the middle of a heap is O(n), so an entry is made stale instead (it is not the live one of its leaf any
    more) and skipped when it comes to the top. The heap is rebuilt once stale entries outnumber live ones. Amortised
    O(log leaves).
    """

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._live: dict[Node, Entry] = {}

    @property
    def num_live(self) -> int:
        return len(self._live)

    def push(self, node: Node, priority: int, last_used: int) -> None:
        """Adds a leaf, unless it is here already."""
        if node in self._live:
            return
        entry = self._live[node] = (priority, last_used, node.id, node)
        heapq.heappush(self._heap, entry)

    def discard(self, node: Node) -> bool:
        """Removes a leaf. Returns whether it was here."""
        if self._live.pop(node, None) is None:
            return False
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = list(self._live.values())
            heapq.heapify(self._heap)
        return True

    def coldest(self) -> Entry | None:
        """Returns the leaf to cut next, or None. It stays in the heap, because it may be truncated only."""
        heap, live = self._heap, self._live
        while heap:
            entry = heap[0]
            if live.get(entry[3]) is entry:
                return entry
            heapq.heappop(heap)
        return None

    def live(self) -> Collection[Entry]:
        return self._live.values()

    def entries(self) -> list[Entry]:
        """Returns live and stale entries (for invariants.py)."""
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
        self.changed: set[str] = set()
        """Tenants whose rank or coldest leaf may have changed."""

    def enter(self, node: Node, priority: int, last_used: int) -> None:
        """Adds a leaf, unless it is here already."""
        heap = self.heaps.get(node.tenant)
        if heap is None:
            heap = self.heaps[node.tenant] = LeafHeap()
        heap.push(node, priority, last_used)
        self.changed.add(node.tenant)

    def discard(self, node: Node) -> None:
        heap = self.heaps.get(node.tenant)
        if heap is not None and heap.discard(node):
            self.changed.add(node.tenant)

    def coldest(self) -> Top | None:
        """Returns the leaf to go first, or None if there is no leaf."""
        while self.changed:
            self._refresh(self.changed.pop())
        tops, live = self._tops, self._live
        while tops:
            top = tops[0]
            if live.get(top[4].tenant) is top:
                return top
            heapq.heappop(tops)
        return None

    def coldest_of(self, tenant: str) -> Entry | None:
        heap = self.heaps.get(tenant)
        return None if heap is None else heap.coldest()

    def _refresh(self, tenant: str) -> None:
        heap = self.heaps.get(tenant)
        entry = None if heap is None else heap.coldest()
        if entry is None:
            self.heaps.pop(tenant, None)
            self._live.pop(tenant, None)
            return
        top = (self.rank(tenant), *entry)
        if self._live.get(tenant) == top:
            return
        self._live[tenant] = top
        heapq.heappush(self._tops, top)
        if len(self._tops) > 2 * len(self._live) + 64:
            self._tops = list(self._live.values())
            heapq.heapify(self._tops)


@dataclass(slots=True, eq=False)
class Standing:
    """The protectors of a node, and what it is worth."""

    priority: int = 0
    """The priority is at least that of every node below (law 9)."""
    num_protectors: int = 0
    """The number of handles here + protected children + 1 if pinned + 1 if it has guests. Law 2."""
    last_used: int = 0
    """The step of the last use."""
    used_ms: int = 0
    born_ms: int = 0
    """The time at which the node's first blocks were inserted."""


class Protection:
    """Protectors along the path to the root, and the priorities of nodes. Unprotected nodes are counted per tenant (law
    7), kept in heaps of leaves, and in the order of their last use."""

    def __init__(self, usage: Usage, root: Node) -> None:
        self.usage = usage
        self.cold = Leaves(usage.rank)
        """Leaves that any request may evict."""
        self.recent = Leaves(usage.rank)
        """Leaves that batch may not evict yet."""
        self.by_use: OrderedDict[Node, None] = OrderedDict()
        """All evictable nodes, the longest unused first: children before parents."""
        self.recent_by_use: OrderedDict[Node, None] = OrderedDict()
        """The evictable nodes that batch may not evict yet, in the same order."""
        self.doomed: set[Node] = set()
        """Nodes that a drop unlinked while they were protected. Nobody finds them any more, and their blocks go with
        their last user."""
        self._standings: dict[Node, Standing] = {root: Standing()}

    @property
    def num_nodes(self) -> int:
        """The number of nodes below the root, those included that a drop unlinked and somebody still uses."""
        return len(self._standings) - 1

    def of(self, node: Node) -> Standing:
        """Returns the standing of a node, which only this module changes."""
        return self._standings[node]

    def priority(self, node: Node) -> int:
        return self._standings[node].priority

    def raise_priority(self, node: Node, priority: int) -> None:
        """Raises a node and all above it to a priority. Only protected nodes may change, as the priority of a leaf in
        the heap is part of its entry. O(nodes that change)."""
        standings = self._standings
        # By law 9 the parents of a node with this priority have it already.
        while node.parent is not None and (standing := standings[node]).priority < priority:
            standing.priority = priority
            node = node.parent

    def protect(self, node: Node | None) -> None:
        """Adds a protector. It stops at the first node that had one already. Amortised O(1) on shared prefixes."""
        standings = self._standings
        while node is not None:
            standing = standings[node]
            standing.num_protectors += 1
            if standing.num_protectors > 1:
                return
            if standing.used_ms:  # it was not inserted just now
                self.usage.counts.reuse_gaps.add(self.usage.now_ms() - standing.used_ms, len(node.block_ids))
            self.left(node, held=len(node.block_ids))
            node = node.parent

    def unprotect(self, node: Node | None, step: int) -> list[Node]:
        """Removes a protector. A node that loses its last protector was last used now. Returns the doomed nodes that
        nobody holds any more, for the caller to reclaim."""
        gone: list[Node] = []
        now, standings = self.usage.now_ms(), self._standings
        while node is not None:
            standing = standings[node]
            assert standing.num_protectors > 0
            standing.num_protectors -= 1
            if standing.num_protectors:
                break
            standing.last_used, standing.used_ms = step, now
            if node in self.doomed:
                gone.append(node)
                self._count(node, held=-len(node.block_ids))
            else:
                self._entered(node, standing)
            node = node.parent
        return gone

    def inserted(self, node: Node, priority: int) -> None:
        """Notes a new node. It gets a protector before anything else happens."""
        self._standings[node] = Standing(priority, born_ms=self.usage.now_ms())
        self._count(node, retained=len(node.block_ids))

    def extended(self, node: Node, num_blocks: int) -> None:
        """Counts `num_blocks` more at a protected node."""
        assert self._standings[node].num_protectors
        self._count(node, held=num_blocks)

    def left(self, node: Node, held: int = 0) -> None:
        """Notes that the node is not evictable any more: it is protected, or it left the tree."""
        num_blocks = len(node.block_ids)
        num_recent = 0
        if node in self.by_use:
            del self.by_use[node]
            leaves = self.cold
            if node in self.recent_by_use:
                del self.recent_by_use[node]
                leaves, num_recent = self.recent, num_blocks
            if not node.children:
                leaves.discard(node)
        self._count(node, held=held, retained=-num_blocks, recent=-num_recent)

    def _entered(self, node: Node, standing: Standing) -> None:
        if node.parent is None:
            return
        num_blocks = len(node.block_ids)
        num_recent = 0
        leaves = self.cold
        self.by_use[node] = None
        if standing.priority >= INTERACTIVE:
            self.recent_by_use[node] = None
            leaves, num_recent = self.recent, num_blocks
        self._count(node, held=-num_blocks, retained=num_blocks, recent=num_recent)
        if not node.children:
            leaves.enter(node, standing.priority, standing.last_used)

    def _count(self, node: Node, held: int = 0, retained: int = 0, recent: int = 0) -> None:
        if node.parent is not None:  # the root has no blocks and no tenant
            self.usage.change(node.tenant, held=held, retained=retained, recent=recent)
            self.ranked(node.tenant)

    def ranked(self, tenant: str) -> None:
        """Notes that the tenant's blocks or bounds have changed, and so perhaps its rank."""
        if tenant in self.cold.heaps:
            self.cold.changed.add(tenant)
        if tenant in self.recent.heaps:
            self.recent.changed.add(tenant)

    def consider(self, node: Node) -> None:
        """Law 3: each evictable leaf has one live entry. This is called wherever a node may just have become one."""
        if node.parent is None or node.children:
            return
        standing = self._standings[node]
        if not standing.num_protectors:
            self._leaves(node).enter(node, standing.priority, standing.last_used)

    def age(self) -> None:
        """Makes recently used nodes cold once RECENT_MS have passed. O(nodes that change)."""
        before = self.usage.now_ms() - RECENT_MS
        while self.recent_by_use:
            node = next(iter(self.recent_by_use))
            if self._standings[node].used_ms > before:
                return
            del self.recent_by_use[node]
            self.recent.discard(node)
            self._count(node, recent=-len(node.block_ids))
            self.consider(node)

    # The order of eviction.

    def coldest(self, reach: Reach) -> tuple[int, Node]:
        """Returns (rank of its tenant, leaf) to be cut next. There must be one within that reach."""
        top, other = self.cold.coldest(), self.recent.coldest() if reach.recent else None
        if top is None or (other is not None and other < top):
            top = other
        assert top is not None
        if top[0] == AT_FLOOR and not reach.floors:
            return AT_FLOOR, self._coldest_behind(reach)
        return top[0], top[4]

    def _coldest_behind(self, reach: Reach) -> Node:
        """Returns the coldest leaf below a node within reach that lies above a floor: all leaves are at floors then,
        and the node belongs to a public prompt that is no longer pinned. O(evictable leaves), for as long as there is
        such a prompt."""
        kinds = (self.cold, self.recent) if reach.recent else (self.cold,)
        entries = [e for kind in kinds for heap in kind.heaps.values() for e in heap.live()]
        return min(e for e in entries if self._hangs(e[3], reach))[3]

    def _hangs(self, leaf: Node, reach: Reach) -> bool:
        node = leaf.parent
        while node is not None and node.parent is not None and not self._standings[node].num_protectors:
            if self.usage.rank(node.tenant) < AT_FLOOR and (reach.recent or node not in self.recent_by_use):
                return True
            node = node.parent
        return False

    def coldest_of(self, tenant: str, reach: Reach) -> Node | None:
        entries = [self.cold.coldest_of(tenant), self.recent.coldest_of(tenant) if reach.recent else None]
        found = [entry for entry in entries if entry is not None]
        return min(found)[3] if found else None

    def _leaves(self, node: Node) -> Leaves:
        return self.recent if node in self.recent_by_use else self.cold

    # The tree's changes (cache/blocks/ownership.py).

    def split(self, upper: Node, tail: Node) -> None:
        """Gives the upper node the tail's standing. The counts of the edge stay as they were: a protected tail is one
        protected child of the upper node, and the upper node replaces it as the protected child of their parent. The
        sum of evictable blocks is the same. An upper node without a protector gets one before anything else happens."""
        one = self._standings[tail]
        num_protectors = 1 if one.num_protectors else 0
        self._standings[upper] = Standing(one.priority, num_protectors, one.last_used, one.used_ms, one.born_ms)
        if tail in self.by_use:
            self.by_use[upper] = None
            if tail in self.recent_by_use:
                self.recent_by_use[upper] = None

    def cut(self, node: Node, num_blocks: int) -> None:
        self._count(node, retained=-num_blocks, recent=-num_blocks if node in self.recent_by_use else 0)

    def removed(self, node: Node) -> None:
        del self._standings[node]
        if self.doomed:
            self.doomed.discard(node)

    def named(self) -> Iterable[Node]:
        """Returns the nodes with a standing, and those of the orders of use and of the heaps' live entries."""
        heaps = [heap for leaves in (self.cold, self.recent) for heap in leaves.heaps.values()]
        in_heaps = {entry[3] for heap in heaps for entry in heap.live()}
        return {*self._standings, *self.by_use, *self.recent_by_use, *self.doomed, *in_heaps}
