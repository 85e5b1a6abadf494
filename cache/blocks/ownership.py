"""Ownership of blocks, which move between the free stack, private block tables and the tree.

There is one law here: the tree is one owner of each of its blocks, a block table is one owner of each of its private
blocks, and the pool's count is their number. A block of the tree that a private table still names is a guest block
(forked choices committed one after another). It protects its node, so the tree is the only owner of anything evictable,
and `free + evictable` is exactly what an allocation can get.

What is known about nodes stands in side tables, each with one owner. A node is split, cut and removed in one function here
each, which tells every table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from cache.blocks.block_pool import BlockPool
from cache.blocks.eviction import Protection
from cache.blocks.guests import Guests
from cache.blocks.pins import Pins
from cache.blocks.usage import ABOVE_FLOOR, AT_FLOOR, FLOOR_SHARE, OVER_QUOTA, EvictionCause, Reach, Usage
from cache.host.offload_policy import OffloadPolicy
from cache.host.tiers import HostTier
from cache.tree.misses import Ghost, GhostList
from cache.tree.radix import Node, RadixTree

IDLE_MS = 3_600_000
"""Milliseconds after which a node that nobody used or pinned is evicted."""
MAX_IDLE_PER_STEP = 256
"""The most nodes that leave in one step, so that no step pays for an hour of idleness."""


class Ownership:
    def __init__(
        self, num_blocks: int, block_size: int, ghost_size: int, now_ms: Callable[[], int], host: HostTier | None = None
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.tree = RadixTree(block_size)
        self.usage = Usage(now_ms, int((num_blocks - 1) * FLOOR_SHARE))
        self.protection = Protection(self.usage, self.tree.root)
        self.guests = Guests()
        self.pins = Pins(self.usage)
        self.offers = None if host is None else OffloadPolicy(host, self.protection.priority)
        self.ghosts = GhostList(ghost_size)
        self.in_tree = bytearray(num_blocks)
        self.moving: set[int] = set()
        """Private blocks that a copy from another tier will fill. Nobody reads or shares them."""
        self.step = 0

    # Private tables.

    def share(self, block_ids: Iterable[int]) -> None:
        for block in block_ids:
            self._check_private(block)
            self._check_still(block)
            self.pool.share(block)

    def free(self, block_ids: Iterable[int]) -> None:
        for block in block_ids:
            self._check_private(block)
            self._check_still(block)
            left = self.pool.free(block)
            if left == 1 and self.in_tree[block]:
                self._guest_left(block)

    # Private -> tree.

    def insert(
        self, node: Node, region: bytes, tokens: Sequence[int], block_ids: Sequence[int], priority: int, tenant: str
    ) -> Node:
        """Adds a child of `node` that takes the blocks over, unprotected for now. O(new blocks)."""
        child = self.tree.add_child(node, region, tokens, block_ids, tenant)
        self.protection.inserted(child, priority)
        self._take(child, block_ids)
        return child

    def extend(self, node: Node, tokens: Sequence[int], block_ids: Sequence[int]) -> None:
        """Lets a protected leaf take the blocks over. O(new blocks)."""
        self.tree.extend(node, tokens, block_ids, node.end_hash)
        self.protection.extended(node, len(block_ids))
        self._take(node, block_ids)

    def _take(self, node: Node, block_ids: Sequence[int]) -> None:
        # The caller's share of the count becomes the tree's. Other tables that name the block keep their shares.
        if self.moving:
            for block in block_ids:
                self._check_still(block)
        for block in block_ids:
            self.in_tree[block] = 1
            if self.pool.refcount(block) > 1 and self.guests.enter(block, node):
                self.protection.protect(node)

    def _guest_left(self, block: int) -> None:
        node = self.guests.leave(block)
        if node is not None:
            self.unprotect(node)

    def _check_private(self, block: int) -> None:
        if self.in_tree[block] and block not in self.guests:
            raise RuntimeError(f"block {block} belongs to the tree, no block table owns it")

    def _check_still(self, block: int) -> None:
        if block in self.moving:
            raise RuntimeError(f"block {block} is moving")

    # Within the tree.

    def end_at(self, node: Node, num_blocks: int) -> Node:
        """Returns the node that ends `num_blocks` into this edge: itself, or the upper half of a split. O(edge)."""
        if num_blocks == len(node.block_ids):
            return node
        upper = self.tree.split(node, num_blocks)
        self.protection.split(upper, node)
        self.pins.split(upper, node)
        if self.offers is not None:
            self.offers.split(upper, node)
        return upper

    def unprotect(self, node: Node) -> None:
        for gone in self.protection.unprotect(node, self.step):
            self._remove(gone)

    # Tree -> free.

    def evict(self, num_blocks: int, reach: Reach, needed_by: str) -> None:
        """Cuts `num_blocks` blocks off the tails of the leaves that are next. They must be within reach. O(log leaves)
        per leaf + O(blocks). A floor does not protect blocks below a public prompt that is no longer pinned, and only
        there: the prompt is within reach, and its descendants must go before it."""
        while num_blocks > 0:
            rank, leaf = self.protection.coldest(reach)
            num_cut = min(num_blocks, len(leaf.block_ids))
            if num_cut > 1:  # there is always one
                num_cut = min(num_cut, self._num_spare(rank, leaf))
            if rank == AT_FLOOR:
                self.usage.counts.num_floor_breaches += 1
            self._cut_tail(leaf, num_cut, "capacity", needed_by)
            num_blocks -= num_cut

    def _num_spare(self, rank: int, leaf: Node) -> int:
        """Returns how many blocks of a leaf may go before the tenant's rank must be checked again."""
        blocks = self.usage.peek(leaf.tenant)
        assert blocks is not None
        if rank == OVER_QUOTA:
            return blocks.num_blocks - blocks.quota
        return blocks.num_above_floor if rank == ABOVE_FLOOR else len(leaf.block_ids)

    def evict_own(self, tenant: str, num_blocks: int, reach: Reach) -> None:
        """Evicts up to `num_blocks` blocks of one tenant's leaves, coldest first."""
        while num_blocks > 0:
            leaf = self.protection.coldest_of(tenant, reach)
            if leaf is None:
                return
            num_cut = min(num_blocks, len(leaf.block_ids))
            self._cut_tail(leaf, num_cut, "quota", tenant)
            num_blocks -= num_cut

    def evict_idle(self) -> None:
        """Evicts nodes that nobody used for IDLE_MS, floors or not. O(nodes that leave)."""
        before = self.usage.now_ms() - IDLE_MS
        for _ in range(MAX_IDLE_PER_STEP):
            leaf = next(iter(self.protection.by_use), None)
            if leaf is None or self.protection.of(leaf).used_ms > before:
                return
            self._cut_tail(leaf, len(leaf.block_ids), "idle", "")

    def _cut_tail(self, leaf: Node, num_cut: int, cause: EvictionCause, needed_by: str) -> None:
        if self.offers is not None and cause != "idle":
            self.offers.leaving(leaf)
        now_ms, counts = self.usage.now_ms(), self.usage.counts
        standing = self.protection.of(leaf)
        counts.lifetimes.add(now_ms - standing.born_ms, num_cut)
        counts.idle_times.add(now_ms - standing.used_ms, num_cut)
        kept = len(leaf.block_ids) - num_cut
        ghost = Ghost(self.step, leaf.region, leaf.tenant, leaf in self.pins.lapsed)
        self.ghosts.add(leaf.hashes[kept:] if kept else leaf.hashes, ghost)
        self.usage.evicted(leaf.tenant, num_cut, cause, needed_by)
        if kept:
            self._cut(leaf, num_cut)
            return
        self.protection.left(leaf)
        parent = self.tree.unlink(leaf)
        self._remove(leaf)
        self.protection.consider(parent)

    def _cut(self, leaf: Node, num_blocks: int) -> None:
        kept = len(leaf.block_ids) - num_blocks
        self._give_up(leaf.block_ids[kept:])
        self.tree.truncate(leaf, kept)
        self.protection.cut(leaf, num_blocks)
        if self.offers is not None:
            self.offers.cut(leaf)

    def _remove(self, node: Node) -> None:
        """Forgets a node that nobody finds or holds any more."""
        self._give_up(node.block_ids)
        self.protection.removed(node)
        self.pins.removed(node)
        if self.offers is not None:
            self.offers.removed(node)

    def _give_up(self, block_ids: Iterable[int]) -> None:
        for block in block_ids:
            self.in_tree[block] = 0
            left = self.pool.free(block)
            assert left == 0, "the tree gave up a block that a table still names"

    def doom(self, top: Node) -> list[Node]:
        """Unlinks a whole branch. Unprotected nodes are given up now. Protected ones are returned: nobody can find them
        any more, and they go with their last protector. O(branch)."""
        parent = self.tree.unlink(top)
        held = []
        for node in list(self.tree.nodes(top)):
            if self.protection.of(node).num_protectors:
                held.append(node)
                continue
            self.protection.left(node)
            self._remove(node)
        self.protection.doomed.update(held)
        self.protection.consider(parent)
        return held
