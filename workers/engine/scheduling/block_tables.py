"""What running sequences hold: blocks and a device row. Taken, shared and published here, and given back here.

The one law: nothing is given back while a launched step may still read or write it. So a sequence that stops running
keeps all it has until the last step launched with it is collected, and a block that the tree had twice stays until
the steps that were launched with it are. Steps are known by number; the cache is the one partner.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from cache.blocks.usage import LAST_RESORT, Reach
from cache.prefix_cache import PrefixCache
from cache.tree.handle import BlockKey, Handle
from workers.engine.sequences.sequence import Attempt, Sequence
from workers.engine.tiers.restores import Restores
from workers.protocol.messages import Tier

PRIORITIES: dict[Tier, int] = {"interactive": 50, "batch": 20}
"""Of prompt blocks in the prefix tree (engine.md section 2.4)."""


class BlockTables:
    def __init__(self, cache: PrefixCache, num_rows: int, restores: Restores | None = None) -> None:
        self.cache = cache
        self.restores = restores
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._launched = -1
        self._collected = -1
        self._leaving: list[Sequence] = []
        self._resuming: dict[Sequence, bool] = {}
        """Those of them, and of those let go right now, that come back; whether somebody is to have their blocks."""
        self._doubles: list[tuple[int, tuple[int, ...]]] = []
        """(last step that may read them, blocks)."""
        self._parted: list[tuple[int, Handle, list[int]]] = []
        """(step that copies from them, handle, blocks)."""

    @property
    def num_leaving(self) -> int:
        """Sequences that run no more and still hold something."""
        return len(self._leaving)

    # --- taking ---

    def acquire(self, sequence: Sequence, num_spare: int, reach: Reach) -> bool:
        """The longest match and blocks for all the rest, if `num_spare` more stay available; else nothing. What the
        host has of the rest is on its way from here on."""
        attempt, cache, restores = sequence.attempt, self.cache, self.restores
        message = attempt.message
        read = message.cache_read and not attempt.wants_prompt_logprobs
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
        self._count(attempt, _num_own(sequence))
        if restores is not None:
            restores.begin(sequence, source, fresh)
        return True

    def fresh_blocks(self, sequence: Sequence, number: int, reach: Reach) -> list[int] | None:
        """So many more, for a running sequence and those that run with it."""
        tenant = sequence.attempt.message.tenant
        return self.cache.allocate(number, reach=reach, needed_by=tenant)

    def fork(self, sequence: Sequence, index: int) -> Sequence:
        """A choice that shares every block; a partly filled tail is copied by whoever writes to it first."""
        handle = sequence.handle
        assert handle is not None
        child = sequence.fork(index)
        child.handle = self.cache.fork(handle)
        self.cache.share(child.block_ids[handle.num_tree_blocks :])
        child.row_id = self._free_rows.pop()
        return child

    def shares(self, sequence: Sequence, index: int) -> bool:
        """Whether another choice's table names this block too."""
        return self.cache.refcount(sequence.block_ids[index]) > 1

    def put(self, sequence: Sequence, index: int, fresh: int) -> tuple[int, int] | None:
        """A fresh block to write to: behind the last one, or in the place of a shared one, which is to be copied: the
        pair is returned. If it is shared no more, the fresh one is not needed."""
        if index == len(sequence.block_ids):
            sequence.block_ids.append(fresh)
            self._count(sequence.attempt, 1)
            return None
        shared = sequence.block_ids[index]
        if self.cache.refcount(shared) == 1:
            self.cache.free([fresh])
            return None
        self.cache.free([shared])
        self._count(sequence.attempt, 1)
        # Another list: a table changes in place at its end only.
        sequence.block_ids = [*sequence.block_ids[:index], fresh, *sequence.block_ids[index + 1 :]]
        return shared, fresh

    @contextmanager
    def spare(self) -> Iterator[tuple[int, int] | None]:
        """A block and a device row for a step of nobody's; None if there are none."""
        blocks = self.cache.allocate(1, reach=LAST_RESORT) if self._free_rows else None
        if blocks is None:
            yield None
            return
        try:
            yield blocks[0], self._free_rows[-1]
        finally:
            self.cache.free(blocks)

    # --- holding less (sparsity.py) ---

    def num_common(self, sequence: Sequence, indices: Iterable[int]) -> int:
        """Blocks that the tree or other tables have too: to be kept alone they are to be copied."""
        return sum(self._is_common(sequence, index) for index in indices)

    def _is_common(self, sequence: Sequence, index: int) -> bool:
        assert sequence.handle is not None
        return index < sequence.handle.num_tree_blocks or self.shares(sequence, index)

    def thin(self, sequence: Sequence, kept: list[int], fresh: list[int], step: int) -> list[tuple[int, int]]:
        """From here on it has the blocks `kept` for itself, in `fresh` ones where they are common, and behind them what
        is left of `fresh`; the pairs to be copied are returned. The tree keeps for others what it had: that was computed
        with everything in sight. `step` makes the copies; the rest is given back when it is collected."""
        attempt, table, handle = sequence.attempt, sequence.block_ids, sequence.handle
        assert handle is not None
        num_own, left = _num_own(sequence), iter(fresh)
        own = {index: next(left) for index in kept if self._is_common(sequence, index)}
        mine = [own.get(index, table[index]) for index in kept]
        stays = set(mine)
        rest = [block for block in table[handle.num_tree_blocks :] if block not in stays]
        self._parted.append((step, handle, table[: handle.num_tree_blocks] + rest))
        sequence.handle = self.cache.acquire(attempt.path, (), tenant=attempt.message.tenant, read=False)
        self._keep(sequence, kept, [*mine, *left])
        self._count(attempt, len(sequence.block_ids) - num_own)
        return [(table[index], block) for index, block in own.items()]

    def turn(self, sequence: Sequence, kept: list[int]) -> None:
        """Of a table that is its own alone one block is emptied, and becomes the one to write to."""
        (gone,) = set(range(len(sequence.block_ids))) - set(kept)
        table = sequence.block_ids
        self._keep(sequence, kept, [*(table[index] for index in kept), table[gone]])

    def _keep(self, sequence: Sequence, kept: list[int], table: list[int]) -> None:
        sequence.num_dropped += (len(sequence.block_ids) - len(kept)) * self.cache.block_size
        sequence.mass = [sequence.mass[index] for index in kept if index < len(sequence.mass)]
        sequence.block_ids = table

    # --- publishing ---

    def publish(self, sequence: Sequence) -> list[BlockKey]:
        """The blocks filled by collected steps go into the tree. Returns their names. Never what was computed without
        sight of everything before it."""
        attempt, handle = sequence.attempt, sequence.handle
        assert handle is not None
        if sequence.num_dropped:
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
            prompt_len=len(attempt.prompt),
            write=message.cache_write,
            deferred=True,
        )
        if result.block_ids is not sequence.block_ids:
            num_own = _num_own(sequence)
            sequence.block_ids = result.block_ids
            self._count(attempt, _num_own(sequence) - num_own)
        sequence.num_offered_blocks = sequence.num_computed // block_size
        if result.freed_duplicates:
            self._doubles.append((self._launched, result.freed_duplicates))
        if result.num_inserted_blocks:
            first = result.num_tree_blocks - result.num_inserted_blocks
            attempt.account.insert(first * block_size, result.num_tree_blocks * block_size)
        return self.cache.last_keys(handle, result.num_tree_blocks - before)

    def pin(self, sequence: Sequence) -> None:
        attempt: Attempt = sequence.attempt
        assert sequence.handle is not None
        if attempt.message.pinned:
            attempt.pinned(self.cache.pin(sequence.handle))
            return
        kept = [self.cache.pin_for(sequence.handle, one.end, one.ttl_ms) for one in attempt.ranges if one.ttl_ms]
        attempt.pinned(max(kept, default=0))

    # --- steps, and giving back ---

    def launched(self, step: int) -> None:
        self._launched = step

    def collected(self, step: int) -> None:
        """The device is past this step, or never got it."""
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
        """As `let_go`, but it comes back, and the host may keep what it had. `needed`: somebody is to have its blocks."""
        if self.restores is not None:
            self._resuming[sequence] = needed
        self.let_go(sequence)

    def let_go(self, sequence: Sequence) -> None:
        """All that it holds, once the last step launched with it is collected."""
        if sequence.last_step > self._collected:
            self._leaving.append(sequence)
        else:
            self._release(sequence)

    def forget(self, sequence: Sequence) -> None:
        """It ended, and comes back no more."""
        self._resuming.pop(sequence, None)
        if self.restores is not None:
            self.restores.forget(sequence)

    def _release(self, sequence: Sequence) -> None:
        assert sequence.handle is not None
        if self.restores is not None:
            self.restores.cancel(sequence)
            if (needed := self._resuming.pop(sequence, None)) is not None:
                self.restores.swap_out(sequence, needed=needed)
        self._count(sequence.attempt, -_num_own(sequence))
        self.cache.release(sequence.handle, sequence.block_ids)
        self._free_rows.append(sequence.row_id)
        sequence.handle = None
        sequence.block_ids = []
        sequence.row_id = -1
        sequence.num_computed = sequence.num_scheduled = sequence.num_dropped = 0
        sequence.mass = []

    def _count(self, attempt: Attempt, num_blocks: int) -> None:
        if num_blocks:
            attempt.residency.change(num_blocks, self.cache.now_ms())


def _num_own(sequence: Sequence) -> int:
    """Blocks that no other table of its attempt names. Tables that share blocks share their beginnings, so these are
    the last ones. O(own blocks x siblings)."""
    table = sequence.block_ids
    others = [s.block_ids for s in sequence.attempt.sequences if s is not sequence]
    for index in range(len(table) - 1, -1, -1):
        if any(len(other) > index and other[index] == table[index] for other in others):
            return len(table) - 1 - index
    return len(table)
