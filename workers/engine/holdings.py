"""What running sequences hold: blocks and a device row. Taken, shared and published here, and given back here.

The one law: nothing is given back while a launched step may still read or write it. So a sequence that stops running
keeps all it has until the last step launched with it is collected, and a block that the tree had twice stays until
the steps that were launched with it are. Steps are known by number; the cache is the one partner.
"""

from __future__ import annotations

from cache.prefix_cache import BlockKey, PrefixCache
from cache.usage import Reach
from workers.engine.sequence import Attempt, Sequence
from workers.protocol.messages import Tier

PRIORITIES: dict[Tier, int] = {"interactive": 50, "batch": 20}
"""Of prompt blocks in the prefix tree (engine.md section 2.4)."""


class Holdings:
    def __init__(self, cache: PrefixCache, num_rows: int) -> None:
        self.cache = cache
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._launched = -1
        self._collected = -1
        self._leaving: list[Sequence] = []
        self._doubles: list[tuple[int, tuple[int, ...]]] = []
        """(last step that may read them, blocks)."""

    @property
    def num_leaving(self) -> int:
        """Sequences that run no more and still hold something."""
        return len(self._leaving)

    # --- taking ---

    def acquire(self, sequence: Sequence, num_spare: int, reach: Reach) -> bool:
        """The longest match and blocks for all the rest, if `num_spare` more stay available; else nothing."""
        attempt, cache = sequence.attempt, self.cache
        message = attempt.message
        handle = cache.acquire(
            attempt.path,
            sequence.tokens,
            tenant=message.tenant,
            read=message.cache_read and not attempt.wants_prompt_logprobs and not message.adapter,
            priority=PRIORITIES[message.tier],
        )
        num_blocks = -(-len(sequence.tokens) // cache.block_size) - len(handle.block_ids)
        fits = num_blocks + num_spare <= cache.available(reach)
        fresh = cache.allocate(num_blocks, reach=reach, needed_by=message.tenant) if fits else None
        if fresh is None:
            cache.release(handle, handle.block_ids)
            return False
        sequence.handle = handle
        sequence.block_ids = handle.block_ids + fresh
        sequence.num_computed = sequence.num_scheduled = handle.num_tokens
        sequence.num_offered_blocks = handle.num_tree_blocks
        sequence.row_id = self._free_rows.pop()
        self._count(sequence, len(sequence.block_ids))
        return True

    def fresh_block(self, sequence: Sequence, reach: Reach) -> int | None:
        """One more, for a running sequence."""
        fresh = self.cache.allocate(1, reach=reach, needed_by=sequence.attempt.message.tenant)
        return None if fresh is None else fresh[0]

    def fork(self, sequence: Sequence, index: int) -> Sequence:
        """A choice that shares every block; a partly filled tail is copied by whoever writes to it first."""
        handle = sequence.handle
        assert handle is not None
        child = sequence.fork(index)
        child.handle = self.cache.fork(handle)
        self.cache.share(child.block_ids[handle.num_tree_blocks :])
        child.row_id = self._free_rows.pop()
        sequence.num_trunk = sequence.num_held
        return child

    def shares(self, sequence: Sequence, index: int) -> bool:
        """Whether another choice's table names this block too."""
        return self.cache.refcount(sequence.block_ids[index]) > 1

    def put(self, sequence: Sequence, index: int, fresh: int) -> tuple[int, int] | None:
        """A fresh block to write to: behind the last one, or in the place of a shared one, which is to be copied: the
        pair is returned. If it is shared no more, the fresh one is not needed."""
        if index == len(sequence.block_ids):
            sequence.block_ids.append(fresh)
            self._count(sequence, 1)
            return None
        shared = sequence.block_ids[index]
        if self.cache.refcount(shared) == 1:
            self.cache.free([fresh])
            return None
        self.cache.free([shared])
        self._count(sequence, 1)
        # Another list: a table changes in place at its end only.
        sequence.block_ids = [*sequence.block_ids[:index], fresh, *sequence.block_ids[index + 1 :]]
        return shared, fresh

    # --- publishing ---

    def publish(self, sequence: Sequence) -> list[BlockKey]:
        """The blocks filled by collected steps go into the tree. Returns their names."""
        attempt, handle = sequence.attempt, sequence.handle
        assert handle is not None
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
            write=message.cache_write and not message.adapter,
            deferred=True,
        )
        sequence.block_ids = result.block_ids
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
        kept = [
            self.cache.pin_for(sequence.handle, one.end, one.ttl_ms)
            for one in attempt.ranges
            if one.ttl_ms
        ]
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

    def let_go(self, sequence: Sequence) -> None:
        """All that it holds, once the last step launched with it is collected."""
        if sequence.last_step > self._collected:
            self._leaving.append(sequence)
        else:
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        assert sequence.handle is not None
        self._count_out(sequence)
        self.cache.release(sequence.handle, sequence.block_ids)
        self._free_rows.append(sequence.row_id)
        sequence.handle = None
        sequence.block_ids = []
        sequence.row_id = -1
        sequence.num_computed = sequence.num_scheduled = 0

    # --- residency ---

    def _count(self, sequence: Sequence, num_blocks: int) -> None:
        sequence.num_held += num_blocks
        sequence.attempt.residency.change(num_blocks, self.cache.now_ms())

    def _count_out(self, sequence: Sequence) -> None:
        """What siblings share goes on with one of them."""
        for heir in sequence.attempt.sequences:
            if sequence.num_trunk and heir is not sequence and heir.handle is not None:
                heir.num_held += sequence.num_trunk
                heir.num_trunk = sequence.num_trunk
                sequence.num_held -= sequence.num_trunk
                break
        self._count(sequence, -sequence.num_held)
        sequence.num_trunk = 0
