"""The blocks and the device row that a running sequence holds. They are taken, shared, published and given back here.

The law: nothing is given back while a launched step may still read or write it. So a sequence that stops running keeps
everything it has until the last step launched with it is collected. A duplicate of a block of the tree stays until the
steps that were launched with it are collected. Steps are known by number, and the module works with the cache only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cache.blocks.usage import LAST_RESORT, Reach
from cache.prefix_cache import PrefixCache
from cache.tree.handle import BlockKey, Handle
from workers.engine.scheduling.kv_layout import KVLayout
from workers.engine.sequences.sequence import Attempt, Sequence
from workers.engine.tiers.restores import Restores
from workers.protocol.messages import Tier

PRIORITIES: dict[Tier, int] = {"interactive": 50, "batch": 20}
"""Priorities of prompt blocks in the prefix tree (engine.md section 2.4)."""


class BlockTables:
    def __init__(self, cache: PrefixCache, num_rows: int, layout: KVLayout, restores: Restores | None = None) -> None:
        self.cache = cache
        self.layout = layout
        self.restores = restores
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._launched = -1
        self._collected = -1
        self._leaving: list[Sequence] = []
        self._resuming: dict[Sequence, bool] = {}
        """The leaving sequences, and those let go in the same call, that will come back. The value tells whether
        another sequence is to have their blocks."""
        self._doubles: list[tuple[int, tuple[int, ...]]] = []
        """Duplicate blocks, as (last step that may read them, blocks)."""
        self._parted: list[tuple[int, Handle, list[int]]] = []
        """Blocks to be released, as (step that copies from them, handle, blocks)."""

    @property
    def num_leaving(self) -> int:
        """Number of sequences that run no more and still hold blocks or a row."""
        return len(self._leaving)

    # --- taking ---

    def acquire(self, sequence: Sequence, num_spare: int, reach: Reach) -> bool:
        """Takes the longest match and blocks for all the rest, if `num_spare` more blocks stay available. Otherwise it
        takes nothing and returns False. Blocks of the rest that the host has are being copied from here on."""
        attempt, cache, restores = sequence.attempt, self.cache, self.restores
        message = attempt.message
        read = attempt.reads_cache
        handle = cache.acquire(
            attempt.path, sequence.tokens, tenant=message.tenant, read=read, priority=PRIORITIES[message.tier]
        )
        source = restores.source(sequence, handle, read=read) if restores is not None else None
        num_blocks = -(-len(sequence.tokens) // cache.block_size) - len(handle.block_ids)
        fits = num_blocks + num_spare <= cache.available(reach)
        fresh = cache.allocate(num_blocks, reach=reach, needed_by=message.tenant) if fits else None
        if fresh is None:
            if restores is not None:
                restores.leave(source)
            cache.release(handle, handle.block_ids)
            return False
        sequence.handle = handle
        sequence.block_ids = handle.block_ids + fresh
        sequence.num_computed = sequence.num_scheduled = handle.num_tokens
        sequence.num_offered_blocks = handle.num_tree_blocks
        sequence.row_id = self._free_rows.pop()
        sequence.num_leading = attempt.held.add(sequence.block_ids)
        if restores is not None:
            restores.begin(sequence, source, fresh)
        return True

    def fresh_blocks(self, sequence: Sequence, number: int, reach: Reach) -> list[int] | None:
        """Returns `number` new blocks for a running sequence and those that run with it, or None if there are too
        few."""
        tenant = sequence.attempt.message.tenant
        return self.cache.allocate(number, reach=reach, needed_by=tenant)

    def fork(self, sequence: Sequence, index: int) -> Sequence:
        """Returns a choice that shares every block. The first to write to a partly filled tail copies it."""
        handle = sequence.handle
        assert handle is not None
        child = sequence.fork(index)
        child.handle = self.cache.fork(handle)
        self.cache.share(child.block_ids[handle.num_tree_blocks :])
        child.num_leading = child.attempt.held.fork(child.block_ids, sequence.num_leading)
        child.row_id = self._free_rows.pop()
        self.layout.forked(sequence, child)
        return child

    def shares(self, sequence: Sequence, index: int) -> bool:
        """Returns whether another choice's table contains this block too."""
        return self.cache.refcount(sequence.block_ids[index]) > 1

    def put(self, sequence: Sequence, index: int, fresh: int) -> tuple[int, int] | None:
        """Puts a fresh block into the table, to be written to. It is appended, or replaces a shared block; then the
        pair to be copied is returned. If the old block is shared no more, the fresh one is not needed and is freed."""
        attempt = sequence.attempt
        if index == len(sequence.block_ids):
            sequence.block_ids.append(fresh)
            attempt.held.append(fresh)
            return None
        shared = sequence.block_ids[index]
        if self.cache.refcount(shared) == 1:
            self.cache.free([fresh])
            return None
        self.cache.free([shared])
        sequence.num_leading = attempt.held.replace(sequence.block_ids, sequence.num_leading, index, fresh)
        # A copy of the list: a table changes in place at its end only.
        sequence.block_ids = [*sequence.block_ids[:index], fresh, *sequence.block_ids[index + 1 :]]
        return shared, fresh

    @contextmanager
    def spare(self) -> Iterator[tuple[int, int] | None]:
        """Yields a block and a device row for a step that belongs to no request, or None if there are none."""
        blocks = self.cache.allocate(1, reach=LAST_RESORT) if self._free_rows else None
        if blocks is None:
            yield None
            return
        if self.restores is not None:
            self.restores.flush()  # the host may be owed a copy of the block
        try:
            yield blocks[0], self._free_rows[-1]
        finally:
            self.cache.free(blocks)

    # --- holding less (kv_layout.py) ---

    def is_common(self, sequence: Sequence, index: int) -> bool:
        """Returns whether the tree or another table holds this block of the sequence too."""
        assert sequence.handle is not None
        return index < sequence.handle.num_tree_blocks or self.shares(sequence, index)

    def detach(self, sequence: Sequence, table: list[int], step: int) -> None:
        """Gives the sequence a table that shares nothing with the tree. What it lacks of the old one is given back when
        `step` is collected, which may copy from there."""
        attempt, before, handle = sequence.attempt, sequence.block_ids, sequence.handle
        assert handle is not None
        stays = set(table)
        rest = [block for block in before[handle.num_tree_blocks :] if block not in stays]
        self._parted.append((step, handle, before[: handle.num_tree_blocks] + rest))
        sequence.handle = self.cache.acquire(attempt.path, (), tenant=attempt.message.tenant, read=False)
        attempt.held.remove(before, sequence.num_leading)
        sequence.block_ids, sequence.num_leading = table, attempt.held.fork(table)

    # --- publishing ---

    def publish(self, sequence: Sequence) -> list[BlockKey]:
        """Puts the blocks filled by collected steps into the tree and returns their keys. Nothing is put there that was
        computed while earlier tokens were dropped."""
        attempt, handle = sequence.attempt, sequence.handle
        assert handle is not None
        if self.layout.num_dropped(sequence) or attempt.is_whole:
            return []
        message = attempt.message
        block_size = self.cache.block_size
        if sequence.num_computed // block_size <= sequence.num_offered_blocks:
            return []
        before = handle.num_tree_blocks
        result = self.cache.commit(
            handle,
            sequence.tokens,
            sequence.block_ids,
            sequence.num_computed,
            priority=PRIORITIES[message.tier],
            output_priority=None if message.output_priority < 0 else message.output_priority,
            ranges=attempt.ranges,
            prompt_len=len(sequence.prompt),
            write=message.cache_write,
            deferred=True,
        )
        if result.block_ids is not sequence.block_ids:
            attempt.held.remove(sequence.block_ids, sequence.num_leading)
            sequence.block_ids, sequence.num_leading = result.block_ids, attempt.held.add(result.block_ids)
        sequence.num_offered_blocks = sequence.num_computed // block_size
        if result.freed_duplicates:
            self._doubles.append((self._launched, result.freed_duplicates))
        if result.num_inserted_blocks:
            first = result.num_tree_blocks - result.num_inserted_blocks
            sequence.account.insert(first * block_size, result.num_tree_blocks * block_size)
        return self.cache.last_keys(handle, result.num_tree_blocks - before)

    def pin(self, sequence: Sequence) -> None:
        attempt: Attempt = sequence.attempt
        assert sequence.handle is not None
        if attempt.message.pinned:
            attempt.report.pinned(self.cache.pin(sequence.handle))
            return
        kept = [self.cache.pin_for(sequence.handle, one.end, one.ttl_ms) for one in attempt.ranges if one.ttl_ms]
        attempt.report.pinned(max(kept, default=0))

    # --- steps, and giving back ---

    def launched(self, step: int) -> None:
        self._launched = step

    def collected(self, step: int) -> None:
        """Records that the device is past this step, or never got it, and gives back what waited for it."""
        self._collected = step
        if self._leaving:
            gone = [s for s in self._leaving if s.last_step <= step]
            self._leaving = [s for s in self._leaving if s.last_step > step]
            for sequence in gone:
                self._release(sequence)
        while self._doubles and self._doubles[0][0] <= step:
            self.cache.free(self._doubles.pop(0)[1])
        while self._parted and self._parted[0][0] <= step:
            self.cache.release(*self._parted.pop(0)[1:])

    def make_room(self, sequence: Sequence, *, needed: bool) -> None:
        """Lets the sequence go as `let_go` does, but it will come back, and the host may keep its blocks' contents.
        `needed` says whether another sequence is to have its blocks."""
        if self.restores is not None:
            self._resuming[sequence] = needed
        self.let_go(sequence)

    def let_go(self, sequence: Sequence) -> None:
        """Gives back all that the sequence holds, once the last step launched with it is collected."""
        if sequence.last_step > self._collected:
            self._leaving.append(sequence)
        else:
            self._release(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Deletes what is kept for a sequence that ended and comes back no more."""
        self._resuming.pop(sequence, None)
        if self.restores is not None:
            self.restores.forget(sequence)

    def _release(self, sequence: Sequence) -> None:
        assert sequence.handle is not None
        if self.restores is not None:
            self.restores.cancel(sequence)
            needed = self._resuming.pop(sequence, None)
            is_needed_whole = sequence.attempt.inputs is not None  # its sum begins anew with its first token
            if needed is not None and not (self.layout.num_dropped(sequence) or is_needed_whole):
                self._swap_out(sequence, self.restores, needed=needed)
        sequence.attempt.held.remove(sequence.block_ids, sequence.num_leading)
        self.cache.release(sequence.handle, sequence.block_ids)
        self._free_rows.append(sequence.row_id)
        sequence.handle = None
        sequence.block_ids, sequence.num_leading = [], 0
        sequence.row_id = -1
        sequence.num_computed = sequence.num_scheduled = 0
        self.layout.forget(sequence)

    def _swap_out(self, sequence: Sequence, restores: Restores, *, needed: bool) -> None:
        if restores.swap_out(sequence, needed=needed):
            sequence.attempt.report.event("swapped_out", self.cache.now_ms() / 1000, num_tokens=sequence.num_computed)
