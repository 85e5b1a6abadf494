from __future__ import annotations

from collections.abc import Callable

import pytest

from cache import invariants
from cache.prefix_cache import PrefixCache
from cache.tree.handle import CommitResult, Handle
from cache.tree.namespaces import PathEntry

Start = Callable[..., tuple[Handle, CommitResult]]
Serve = Callable[..., Handle]

OPERATOR = (PathEntry(b"public", -1),)
ANNA = (PathEntry(b"public", 4), PathEntry(b"anna", -1))
BERT = (PathEntry(b"public", 4), PathEntry(b"bert", -1))


@pytest.fixture
def cache() -> PrefixCache:
    return PrefixCache(12, 2, pin_limit=4)


def fill_and_pin(cache: PrefixCache, start: Start, tokens: list[int]) -> int:
    handle, result = start(cache, OPERATOR, tokens)
    num_pinned = cache.pin(handle)
    cache.release(handle, result.block_ids)
    invariants.check(cache, [])
    return num_pinned


def test_a_pinned_prompt_outlives_every_allocation(cache: PrefixCache, start: Start) -> None:
    assert fill_and_pin(cache, start, [1, 2, 3, 4]) == 2
    assert (cache.num_evictable, cache.num_pinned) == (0, 2)
    assert cache.allocate(10) is None
    assert cache.allocate(9) is not None
    assert cache.match(ANNA, [1, 2, 3, 4, 5]) == 4


def test_an_unpinned_prompt_can_be_evicted_again(cache: PrefixCache, start: Start) -> None:
    fill_and_pin(cache, start, [1, 2, 3, 4])
    assert cache.unpin(b"anna") == 0
    assert cache.unpin(b"public") == 1
    assert (cache.num_evictable, cache.num_pinned) == (2, 0)
    assert cache.allocate(11) is not None
    invariants.check(cache, [])


def test_a_pin_survives_a_split_of_its_edge(cache: PrefixCache, start: Start, serve: Serve) -> None:
    fill_and_pin(cache, start, [1, 2, 3, 4])
    serve(cache, OPERATOR, [1, 2, 9, 9])
    assert cache.num_pinned == 2
    cache.allocate(9)
    assert cache.match(OPERATOR, [1, 2, 3, 4, 5]) == 4
    assert cache.match(OPERATOR, [1, 2, 9, 9, 5]) == 2


def test_pinning_twice_is_pinning_once(cache: PrefixCache, start: Start) -> None:
    assert fill_and_pin(cache, start, [1, 2, 3, 4]) == fill_and_pin(cache, start, [1, 2, 3, 4]) == 2
    assert cache.unpin(b"public") == 1
    assert cache.num_evictable == 2


def test_pins_beyond_the_limit_are_refused_and_blocks_under_two_pins_count_once(
    cache: PrefixCache, start: Start
) -> None:
    assert fill_and_pin(cache, start, [1, 2, 3, 4]) == 2
    assert fill_and_pin(cache, start, [1, 2, 3, 4, 5, 6]) == 3
    assert cache.num_pinned == 3
    assert fill_and_pin(cache, start, [7, 7, 8, 8]) == 0
    assert (cache.num_pinned, cache.num_evictable) == (3, 2)


def test_nothing_can_be_pinned_at_the_root(cache: PrefixCache) -> None:
    assert cache.pin(cache.acquire(OPERATOR, [1, 2, 3])) == 0


def test_a_dropped_region_is_gone_and_its_neighbours_stay(cache: PrefixCache, serve: Serve) -> None:
    serve(cache, OPERATOR, [1, 2, 3, 4])
    serve(cache, ANNA, [1, 2, 3, 4, 5, 6, 7, 8])
    serve(cache, BERT, [1, 2, 3, 4, 5, 6])
    assert cache.drop(b"anna") == 2
    assert cache.match(ANNA, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 4
    assert cache.match(BERT, [1, 2, 3, 4, 5, 6, 7]) == 6
    invariants.check(cache, [])


def test_a_parent_left_bare_by_a_drop_can_be_evicted(cache: PrefixCache, serve: Serve) -> None:
    serve(cache, OPERATOR, [1, 2, 3, 4])
    serve(cache, ANNA, [1, 2, 3, 4, 5, 6])
    cache.drop(b"anna")
    assert cache.allocate(11) is not None
    invariants.check(cache, [])


def test_a_drop_takes_branches_within_the_region_once(cache: PrefixCache, serve: Serve) -> None:
    serve(cache, OPERATOR, [1, 2, 3, 4])
    serve(cache, OPERATOR, [1, 2, 5, 6])
    assert cache.drop(b"public") == 3
    assert cache.num_free == 11
    invariants.check(cache, [])


def test_a_dropped_region_leaves_no_ghosts(serve: Serve) -> None:
    cache = PrefixCache(8, 2)
    tenant = (PathEntry(b"anna", -1),)
    serve(cache, tenant, [1, 2])
    cache.free(cache.allocate(7) or [])
    cache.drop(b"anna")
    assert cache.acquire(tenant, [1, 2, 3]).miss_reason == "cold"


def test_a_dropped_public_region_takes_all_below_it_and_its_pins(
    cache: PrefixCache, start: Start, serve: Serve
) -> None:
    fill_and_pin(cache, start, [1, 2, 3, 4])
    serve(cache, ANNA, [1, 2, 3, 4, 5, 6])
    assert cache.drop(b"public") == 3
    assert (cache.num_free, cache.num_evictable, cache.num_pinned) == (11, 0, 0)
    invariants.check(cache, [])


def test_blocks_under_a_running_sequence_go_when_it_ends(cache: PrefixCache, start: Start) -> None:
    handle, result = start(cache, (PathEntry(b"anna", -1),), [1, 2, 3, 4])
    assert cache.drop(b"anna") == 0
    assert cache.match((PathEntry(b"anna", -1),), [1, 2, 3, 4, 5]) == 0
    invariants.check(cache, [handle])
    assert cache.pin(handle) == 0
    table = [*result.block_ids, *(cache.allocate(1) or [])]
    assert cache.commit(handle, [1, 2, 3, 4, 5, 6], table, 6).num_inserted_blocks == 0
    cache.release(handle, table)
    assert (cache.num_free, cache.num_evictable) == (11, 0)
    invariants.check(cache, [])


def test_a_choice_does_not_insert_again_what_was_dropped_under_its_sibling(cache: PrefixCache) -> None:
    tokens = [1, 2, 3, 4]
    path = (PathEntry(b"anna", -1),)
    first, table = cache.acquire(path, tokens), cache.allocate(2) or []
    second = cache.fork(first)
    cache.share(table)
    cache.commit(first, tokens, table, 4)
    cache.drop(b"anna")
    assert cache.commit(second, tokens, table, 4).num_inserted_blocks == 0
    cache.release(first, table)
    invariants.check(cache, [second])
    cache.release(second, table)
    assert cache.num_free == 11
    invariants.check(cache, [])
