"""The prefix cache as the engine sees it: match, acquire, allocate, commit, release, evict.

It knows block ids, token ids, opaque regions and steps. It does not know KV bytes, requests or the time of day; one
thread owns it. A block table always is

    [ tree blocks, protected by the handle | private blocks of the sequence | ... the last one partly filled ]
      0 ........... handle.num_tree_blocks

and `commit` moves the border to the right, never to the left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from cache.blocks.block_pool import NULL_BLOCK
from cache.blocks.commits import Commits
from cache.blocks.ownership import IDLE_MS, Ownership
from cache.blocks.retention import Retention
from cache.blocks.usage import SHARED, UNLIMITED, CacheCounts, Reach, TenantBlocks
from cache.blocks.worth import Range, Worth
from cache.host.tiers import HostBlock, HostTier
from cache.tree.groups import GroupWatch
from cache.tree.handle import BlockKey, CommitResult, Handle, Probe
from cache.tree.misses import Miss, explain
from cache.tree.namespaces import NamespacePath, Segment, segments
from cache.tree.predecessor import Predecessor
from cache.tree.radix import Node, Walk


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class PrefixCache:
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        ghost_size: int | None = None,
        pin_limit: int | None = None,
        now_ms: Callable[[], int] = _monotonic_ms,
        host: HostTier | None = None,
    ) -> None:
        """`num_blocks` counts the null block. `ghost_size` (evicted blocks that are remembered) defaults to num_blocks,
        `pin_limit` (blocks that pins may hold) to a fifth of them. `now_ms` is read for usage, for recent use, and for
        pins that expire; the order of eviction goes by steps."""
        self.now_ms = now_ms
        self._began_ms = now_ms()
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.host = host
        self.owners = Ownership(num_blocks, block_size, num_blocks if ghost_size is None else ghost_size, now_ms, host)
        self._tree = self.owners.tree
        self._protection = self.owners.protection
        self._usage = self.owners.usage
        self._commits = Commits(self.owners)
        self.retention = Retention(self.owners, num_blocks // 5 if pin_limit is None else pin_limit)
        self.predecessor: Predecessor | None = None
        """The names of blocks that the process before this one had cached under another root. They are dropped after
        IDLE_MS."""
        self._num_handles = 0
        self._purged: dict[str, int] = {}

    @property
    def num_free(self) -> int:
        return self.owners.pool.num_free

    @property
    def num_evictable(self) -> int:
        return self._usage.num_evictable

    def available(self, reach: Reach) -> int:
        """Returns how many blocks `allocate` can give within that reach. An acquired match is no longer part of it.
        O(1)."""
        return self.num_free + self._usage.available(reach)

    @property
    def num_moving(self) -> int:
        """Number of private blocks that a copy from another tier is filling."""
        return len(self.owners.moving)

    @property
    def num_pinned(self) -> int:
        return self.retention.num_blocks

    @property
    def num_nodes(self) -> int:
        return self._protection.num_nodes

    @property
    def step(self) -> int:
        return self.owners.step

    @property
    def counts(self) -> CacheCounts:
        return self._usage.counts

    def usage(self, tenant: str) -> TenantBlocks:
        """Returns the blocks of the tree that the tenant inserted, held and retained, with their block-milliseconds.
        O(1)."""
        return self._usage.of(tenant)

    def tenants(self) -> tuple[str, ...]:
        return self._usage.tenants()

    def look(self) -> dict[str, TenantBlocks]:
        """Returns the usage of the tenants that have blocks or changed since the last look, and forgets who has nothing
        left. O(what is returned)."""
        return self._usage.look()

    def watch_groups(self, secret: bytes, root: str) -> GroupWatch:
        """Follows from now on which whole groups of tokens are in the tree; there is one watch at a time. O(tree)."""
        return GroupWatch(self._tree, secret, root.encode())

    def set_share(self, tenant: str, *, floor: int = 0, quota: int | None = None) -> None:
        """Sets the blocks of the tree that stay with the tenant when others need some, and the most it may have; the
        last call counts. Floors beyond the pool's share for them are cut to what is left of it. O(1)."""
        if self._usage.set_share(tenant, floor, UNLIMITED if quota is None else quota):
            self._protection.ranked(tenant)
        if self.host is not None:
            scaled = None if quota is None else quota * self.host.num_slots // self.num_blocks
            self.host.set_quota(tenant, scaled)

    def begin_step(self) -> None:
        """Advances one step, the unit of LRU time. Pins that are due end, recent nodes turn cold, idle ones leave.
        O(what changes)."""
        self.owners.step += 1
        if self.predecessor is not None and self.now_ms() - self._began_ms >= IDLE_MS:
            self.predecessor = None
        self.retention.expire()
        self._protection.age()
        self.owners.evict_idle()

    # The tree's part of a block table.

    def match(self, path: NamespacePath, tokens: Sequence[int]) -> int:
        """Returns the number of cached tokens that `acquire` would give now: whole blocks, at most len(tokens) - 1. It
        changes nothing. O(matched tokens) at the speed of a C comparison for array('i'); a list is converted as far as
        it matches."""
        return self._walk(segments(path, self.block_size), tokens).num_blocks * self.block_size

    def probe(self, path: NamespacePath, tokens: Sequence[int]) -> Probe:
        """Returns what `match` does, with the name of the block at which it ended."""
        blocks = segments(path, self.block_size)
        walk = self._walk(blocks, tokens)
        depth = walk.num_blocks
        key = None
        if (depth + 1) * self.block_size < len(tokens):
            region = next(segment.region for segment in blocks if depth < segment.end)
            key = region, self._tree.hash_of(self._tree.hash_at(walk), region, tokens, depth)
        return Probe(depth * self.block_size, key)

    def next_key(self, handle: Handle, tokens: Sequence[int]) -> BlockKey | None:
        """Returns the name of the block that a commit of this handle would insert next, or None if it may insert none
        or the tokens end before it. O(block)."""
        depth = handle.num_tree_blocks
        public_end = handle.path[-2].end if len(handle.path) > 1 else 0
        if handle.node in self._protection.doomed or depth < public_end or (depth + 1) * self.block_size > len(tokens):
            return None
        region = handle.path[-1].region
        return region, self._tree.hash_of(handle.node.end_hash, region, tokens, depth)

    def last_keys(self, handle: Handle, num_blocks: int) -> list[BlockKey]:
        """Returns the names of the last blocks that the tree holds for this handle, the deepest first.
        O(num_blocks)."""
        keys: list[BlockKey] = []
        node: Node | None = handle.node
        while node is not None and len(keys) < num_blocks:
            missing = num_blocks - len(keys)
            keys += [(node.region, h) for h in reversed(node.hashes[-missing:])]
            node = node.parent
        return keys

    def acquire(
        self, path: NamespacePath, tokens: Sequence[int], *, tenant: str = "", read: bool = True, priority: int = 0
    ) -> Handle:
        """Returns the longest match, protected until `release`. The matched nodes are raised to `priority`, so that a
        chat keeps its hit even if a batch wrote it. O(match + nodes on the path); it splits one edge at most."""
        began = time.perf_counter()
        blocks = segments(path, self.block_size)
        if read:
            walk = self._walk(blocks, tokens)
            miss = explain(self._tree, self.owners.ghosts, blocks, tokens, walk, self.step, self.predecessor)
            node, num_blocks = self.owners.end_at(walk.node, walk.num_in_edge), walk.num_blocks
        else:
            miss, node, num_blocks = Miss("opt_out"), self._tree.root, 0
        self._protection.protect(node)
        self._protection.raise_priority(node, priority)
        self.retention.refresh(node)
        self._num_handles += 1
        self.counts.num_matches += 1
        self.counts.match_s += time.perf_counter() - began
        public = min(num_blocks, blocks[0].end) if len(blocks) > 1 else 0
        return Handle(
            block_ids=self._tree.ids_between(self._tree.root, node),
            num_tokens=num_blocks * self.block_size,
            public_tokens=public * self.block_size,
            miss_reason=miss.reason,
            diverged_at_token=miss.diverged_at_token,
            evicted_age=miss.evicted_age,
            number=self._num_handles,
            tenant=tenant,
            path=blocks,
            node=node,
            num_tree_blocks=num_blocks,
        )

    def fork(self, handle: Handle) -> Handle:
        """Returns a handle with a second protector on the same node, for a parallel choice. Its table is a copy of the
        first one; the caller passes the part after `num_tree_blocks` to `share`."""
        self._check_live(handle)
        self._protection.protect(handle.node)
        return replace(handle, block_ids=list(handle.block_ids))

    def release(self, handle: Handle, block_ids: Sequence[int]) -> None:
        """Gives back all that a sequence holds. A second release raises RuntimeError and changes nothing. O(private
        blocks) + amortised O(1)."""
        self._check_live(handle)
        if len(block_ids) < handle.num_tree_blocks:
            raise ValueError(f"{len(block_ids)} blocks cannot contain {handle.num_tree_blocks} tree blocks")
        handle.released = True
        self.free(block_ids[handle.num_tree_blocks :])
        self.owners.unprotect(handle.node)

    # The private part.

    def allocate(self, n: int, *, reach: Reach = SHARED, needed_by: str = "") -> list[int] | None:
        """Returns n private blocks with count 1, evicting unprotected leaves within `reach` as needed. Returns None,
        with nothing changed, if there are fewer. O(n) + O(log leaves) per leaf cut."""
        if n > self.available(reach):
            return None
        self.owners.evict(n - self.num_free, reach, needed_by)
        return self.owners.pool.alloc(n)

    def share(self, block_ids: Iterable[int]) -> None:
        """Notes that one more block table names these private blocks."""
        self.owners.share(block_ids)

    def free(self, block_ids: Iterable[int]) -> None:
        """Notes that one block table fewer names these private blocks; the last one returns them. Null blocks are
        skipped."""
        self.owners.free(block for block in block_ids if block != NULL_BLOCK)

    def refcount(self, block: int) -> int:
        """Returns the number of owners of a block. With more than one, copy the block before writing to it."""
        return self.owners.pool.refcount(block)

    # From the private part to the tree's.

    def commit(
        self,
        handle: Handle,
        tokens: Sequence[int],
        block_ids: list[int],
        num_committed: int,
        *,
        priority: int = 50,
        output_priority: int | None = None,
        ranges: tuple[Range, ...] = (),
        prompt_len: int | None = None,
        write: bool = True,
        deferred: bool = False,
    ) -> CommitResult:
        """Publishes the whole blocks of tokens[:num_committed]. O(new blocks), + O(table) if a duplicate is replaced.

        Law 6: never more is inserted than is committed; drafts, the token whose KV is not written yet and steps in
        flight come after `num_committed`. Only the last region of the handle's path is written. A block in the public
        part is at best replaced by the operator's, else it stays private, and so do all blocks after it, which would
        have no parent. A block that forked choices share is inserted by the first of them; the others find it. Blocks
        from `prompt_len` on are output and get a lower priority, `output_priority` if given; `ranges` of the prompt may
        have their own priorities. Blocks beyond a quota stay private.
        """
        self._check_live(handle)
        if num_committed > min(len(tokens), len(block_ids) * self.block_size):
            raise ValueError(
                f"{num_committed} committed tokens: only {len(tokens)} tokens and {len(block_ids)} blocks are given"
            )
        target = num_committed // self.block_size
        purged = handle.number <= self._purged.get(handle.tenant, 0)
        if not write or purged or handle.node in self._protection.doomed or target <= handle.num_tree_blocks:
            return CommitResult(block_ids, 0, handle.num_tree_blocks)
        prompt_end = target if prompt_len is None else prompt_len // self.block_size
        worth = Worth(self.block_size, prompt_end, priority, output_priority, ranges)
        return self._commits.publish(handle, tokens, block_ids, target, worth, deferred)

    # The host tier (cache/host/tiers.py).

    def hit(self, handle: Handle) -> None:
        """Notes that a request runs on the blocks it acquired."""
        if self.owners.offers is not None:
            node = handle.node
            while node in self._protection.doomed and node.parent is not None:
                node = node.parent
            self.owners.offers.hit(node)

    def copies(self, handle: Handle, tokens: Sequence[int]) -> list[HostBlock]:
        """Returns the copies of the blocks after the handle's, as far as the host tier has them. One token is always
        computed."""
        if self.host is None:
            return []
        limit = max(0, len(tokens) - 1) // self.block_size
        return self.host.match(handle.path, tokens, handle.num_tree_blocks, limit)

    def offer(self, path: NamespacePath, tokens: Sequence[int]) -> None:
        """Copies the blocks that the tree has of a prompt to the host tier, hot or not, so that later blocks can follow
        them there."""
        walk = self._walk(segments(path, self.block_size), tokens)
        if self.owners.offers is not None and walk.node.parent is not None:
            self.owners.offers.write(walk.node)

    def begin_move(self, block_ids: Iterable[int]) -> None:
        """Marks private blocks that a copy from another tier will fill. Until `end_move` they are neither freed nor
        shared nor published."""
        self.owners.moving.update(block_ids)

    def end_move(self, block_ids: Iterable[int]) -> None:
        self.owners.moving.difference_update(block_ids)

    # Pins and drops (cache/blocks/retention.py).

    def pin(self, handle: Handle) -> int:
        """Keeps everything up to the handle's node until `unpin` or `drop`. Returns the number of blocks on that path;
        0 if there are none or the pin limit forbids it."""
        self._check_live(handle)
        return handle.num_tree_blocks if self.retention.pin(handle.node) else 0

    def pin_for(self, handle: Handle, num_tokens: int, ttl_ms: int) -> int:
        """Keeps the first `num_tokens` for `ttl_ms` after their last use. Returns the number of blocks that are pinned
        now: fewer, or none, if the budget of the tenant or of all tenants is used up."""
        self._check_live(handle)
        if handle.node.region != handle.path[-1].region:
            return 0  # the tree has nothing of it but what the operator wrote
        return self.retention.pin_for(handle.node, num_tokens // self.block_size, ttl_ms)

    def unpin(self, region: bytes) -> int:
        """Lifts the pins on nodes of a region. Returns their number."""
        return self.retention.unpin(region)

    def drop(self, region: bytes) -> int:
        """Forgets a region, all regions whose ids begin with its id, and everything below them, pins included. Returns
        the number of blocks freed at once. Blocks under a running sequence can be found by nobody any more and go when
        it ends; blocks that it commits later stay private. A sequence that held nothing of the region yet may still
        write there: end the tenant's sequences first. O(nodes)."""
        self.owners.ghosts.forget(lambda ghost: ghost.region.startswith(region))
        self.predecessor = None
        if self.host is not None:
            self.host.drop(region)
        return self.retention.drop(lambda node: node.region.startswith(region))

    def purge(self, tenant: str) -> int:
        """Forgets everything that a tenant inserted, in every region, as `drop` does. Sequences that run write nothing
        from here on; those that are admitted later do. O(nodes)."""
        self._purged[tenant] = self._num_handles
        self.predecessor = None
        self.owners.ghosts.forget(lambda ghost: ghost.tenant == tenant)
        if self.host is not None:
            self.host.purge(tenant)
        return self.retention.drop(lambda node: node.tenant == tenant)

    def _walk(self, path: tuple[Segment, ...], tokens: Sequence[int]) -> Walk:
        # One token is always computed: its logits start the output.
        limit = max(0, len(tokens) - 1) // self.block_size
        return self._tree.walk(path, tokens, limit, self._tree.root, 0)

    def _check_live(self, handle: Handle) -> None:
        if handle.released:
            raise RuntimeError("this handle was released already")
