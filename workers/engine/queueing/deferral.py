"""In-batch prefix deferral: of waiting prompts that share uncached blocks, one computes and the others wait for it.

A leader is a running prefill; it is known by the block that it will put into the prefix tree next. Whoever waits at
that block, with two blocks or more in common, is better off waiting for the commit. A block's key carries its region,
and a leader leads in the region that it writes, so nobody waits for another tenant, but for a fill of a public prompt.
Knows sequences and the cache's names of blocks; counts steps, not time.
"""

from __future__ import annotations

from cache.prefix_cache import PrefixCache
from cache.tree.handle import BlockKey
from workers.engine.sequences.sequence import Sequence

MAX_STEPS = 8
"""Without progress of the leader nobody waits longer."""

MIN_SHARED_BLOCKS = 2


class Deferral:
    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._leaders: dict[BlockKey, Sequence] = {}
        self._keys: dict[Sequence, BlockKey] = {}

    def lead(self, sequence: Sequence) -> None:
        """It entered, or its chunk was committed: its next block is the one to wait for. The first leader stays."""
        self.forget(sequence)
        handle, message = sequence.handle, sequence.attempt.message
        if handle is None or not message.cache_write:
            return
        key = self._cache.next_key(handle, sequence.attempt.prompt)
        if key is not None and key not in self._leaders:
            self._leaders[key] = sequence
            self._keys[sequence] = key

    def forget(self, sequence: Sequence) -> None:
        """It runs no more, or leads elsewhere."""
        key = self._keys.pop(sequence, None)
        if key is not None:
            del self._leaders[key]

    def leader(self, sequence: Sequence, num_cached: int, key: BlockKey | None) -> Sequence | None:
        """Whom to wait for, of a sequence that matches `num_cached` tokens and misses the block `key` first."""
        leader = None if key is None else self._leaders.get(key)
        if leader is None or not sequence.attempt.message.cache_read:
            return None
        end = num_cached + MIN_SHARED_BLOCKS * self._cache.block_size
        shared = sequence.tokens[num_cached:end]
        whole = len(shared) == end - num_cached
        return leader if whole and shared == leader.attempt.prompt[num_cached:end] else None
