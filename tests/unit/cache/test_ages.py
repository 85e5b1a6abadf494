"""How old blocks are when they leave the cache, how long they were idle, and when they come back."""

from __future__ import annotations

from cache.blocks.ages import BOUNDS_S, Ages
from cache.prefix_cache import PrefixCache
from cache.tree.namespaces import PathEntry

PATH = (PathEntry(b"tenant", -1),)


class Clock:
    def __init__(self) -> None:
        self.ms = 1_000

    def __call__(self) -> int:
        return self.ms


def write(cache: PrefixCache, tokens: list[int]) -> None:
    handle = cache.acquire(PATH, tokens, tenant="t")
    fresh = cache.allocate(len(tokens) // 2 - handle.num_tree_blocks)
    assert fresh is not None
    done = cache.commit(handle, tokens, [*handle.block_ids, *fresh], len(tokens))
    cache.release(handle, done.block_ids)


def bucket(ages: Ages, seconds: float) -> int:
    return ages.counts[next(i for i, bound in enumerate(BOUNDS_S) if seconds <= bound)]


def test_a_reuse_and_an_eviction_are_counted_by_block() -> None:
    clock = Clock()
    cache = PrefixCache(9, 2, now_ms=clock)
    write(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    assert sum(cache.counts.reuse_gaps.counts) == 0, "a first insertion is no reuse"
    assert cache.num_nodes == 1
    clock.ms += 4_000
    write(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    assert bucket(cache.counts.reuse_gaps, 4.0) == 4
    assert cache.counts.num_matches == 2
    clock.ms += 20_000
    assert cache.allocate(8) is not None  # everything has to leave
    assert cache.num_nodes == 0
    assert sum(cache.counts.lifetimes.counts) == sum(cache.counts.idle_times.counts) == 5
    assert bucket(cache.counts.lifetimes, 24.0) == 5
    assert bucket(cache.counts.idle_times, 20.0) == 5
    assert cache.counts.idle_times.sum_s == 100.0


def test_a_split_keeps_the_age_and_a_dropped_branch_the_count_of_nodes() -> None:
    clock = Clock()
    cache = PrefixCache(20, 2, now_ms=clock)
    write(cache, [1, 2, 3, 4, 5, 6])
    clock.ms += 8_000
    write(cache, [1, 2, 9, 9, 9, 9])
    assert cache.num_nodes == 3  # the common block, and two tails
    cache.drop(b"tenant")
    assert cache.num_nodes == 0
