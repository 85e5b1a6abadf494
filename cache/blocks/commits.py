"""Commits: blocks that a sequence has filled move from its private table to the tree.

A commit adopts what the tree has already, and inserts what follows it. The module knows handles and what may be inserted;
it does not know where a sequence's computation stands, which its caller checks (law 6).
"""

from __future__ import annotations

from collections.abc import Sequence

from cache.blocks.block_pool import NULL_BLOCK
from cache.blocks.eviction import INTERACTIVE
from cache.blocks.ownership import Ownership
from cache.blocks.usage import COLD, SHARED
from cache.blocks.worth import Worth
from cache.tree.handle import CommitResult, Handle
from cache.tree.radix import Node, token_slice


class Commits:
    def __init__(self, owners: Ownership) -> None:
        self._owners = owners

    def publish(
        self, handle: Handle, tokens: Sequence[int], block_ids: list[int], target: int, worth: Worth, deferred: bool
    ) -> CommitResult:
        """Moves the handle's end to at most `target` blocks. With `deferred` the caller frees the duplicates. O(new
        blocks), + O(table) if a duplicate is replaced."""
        owners = self._owners
        walk = owners.tree.walk(handle.path, tokens, target, handle.node, handle.num_tree_blocks)
        found, start = owners.end_at(walk.node, walk.num_in_edge), walk.num_blocks
        table, duplicates = self._adopt(handle, block_ids, found)
        # From here on nothing on the path can be evicted, not even for this tenant's own quota.
        self._move(handle, found, start)
        owners.protection.raise_priority(found, worth.of_block(start - 1))
        end = self._insertable_until(handle, table, start, target)
        end = start + self._within_quota(handle, end - start, worth.prompt)
        node, done = found, start
        for piece_end, priority in worth.pieces(start, end):
            node = self._insert(handle, node, tokens, table, done, piece_end, priority)
            done = piece_end
        self._move(handle, node, end)
        if end > start and owners.offers is not None:
            owners.offers.committed(node)
        # This comes last: a freed guest block may be what protected the nodes just walked.
        owners.free(mine for mine, kept in duplicates if mine == kept or not deferred)
        dropped = tuple(mine for mine, kept in duplicates if mine != kept)
        return CommitResult(table, end - start, end, dropped)

    def _adopt(self, handle: Handle, block_ids: list[int], found: Node) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the table with the tree's ids up to the end of `found`, and the replaced pairs (our block, the
        tree's)."""
        start = handle.num_tree_blocks
        theirs = self._owners.tree.ids_between(handle.node, found)
        pairs = list(zip(block_ids[start : start + len(theirs)], theirs, strict=True))
        if any(mine != kept for mine, kept in pairs):
            block_ids = [*block_ids[:start], *theirs, *block_ids[start + len(theirs) :]]
        return block_ids, [(mine, kept) for mine, kept in pairs if mine != NULL_BLOCK]

    def _insertable_until(self, handle: Handle, table: list[int], start: int, target: int) -> int:
        public_end = handle.path[-2].end if len(handle.path) > 1 else 0
        if start < public_end:
            return start
        in_tree = self._owners.in_tree
        for depth in range(start, target):
            # A null block has left the attention window; a block of the tree is in a branch that was dropped.
            if table[depth] == NULL_BLOCK or in_tree[table[depth]]:
                return depth
        return target

    def _within_quota(self, handle: Handle, wanted: int, priority: int) -> int:
        """Returns how many more blocks the tenant may insert, after its own coldest ones were evicted for them.
        O(blocks)."""
        usage = self._owners.usage
        blocks = usage.peek(handle.tenant)
        if not wanted or blocks is None or wanted <= (room := blocks.quota - blocks.num_blocks):
            return wanted
        reach = SHARED if priority >= INTERACTIVE else COLD
        self._owners.evict_own(handle.tenant, wanted - room, reach)
        room = blocks.quota - blocks.num_blocks
        if room < wanted:
            usage.counts.num_refused_inserts += 1
        return max(0, min(wanted, room))

    def _insert(
        self, handle: Handle, node: Node, tokens: Sequence[int], table: list[int], start: int, end: int, priority: int
    ) -> Node:
        owners, region = self._owners, handle.path[-1].region
        size = owners.tree.block_size
        new_tokens, new_ids = token_slice(tokens, start * size, end * size), table[start:end]
        if self._may_grow(handle, node, region, priority):
            owners.extend(node, new_tokens, new_ids)
            return node
        owners.protection.raise_priority(node, priority)
        return owners.insert(node, region, new_tokens, new_ids, priority, handle.tenant)

    def _may_grow(self, handle: Handle, node: Node, region: bytes, priority: int) -> bool:
        """Says whether the edge may grow in place: only while this handle alone holds its end. Any other handle, pin or
        guest there stands for the point at which the edge ends now."""
        if node is not handle.node or node.children or node.parent is None or node.region != region:
            return False
        standing = self._owners.protection.of(node)
        return standing.num_protectors == 1 and standing.priority == priority

    def _move(self, handle: Handle, node: Node, num_blocks: int) -> None:
        # The new node is protected before the old one is released, so that nothing on the path is unprotected in
        # between.
        self._owners.protection.protect(node)
        self._owners.unprotect(handle.node)
        handle.node, handle.num_tree_blocks = node, num_blocks
