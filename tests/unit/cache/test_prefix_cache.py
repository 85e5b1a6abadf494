"""Acquire, allocate, commit, fork and release, one behaviour each. Block size 2 where not said otherwise."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest

from cache import invariants
from cache.blocks.usage import SHARED
from cache.prefix_cache import PrefixCache
from cache.tree import radix
from cache.tree.handle import CommitResult, Handle
from cache.tree.namespaces import PathEntry

Start = Callable[..., tuple[Handle, CommitResult]]
Serve = Callable[..., Handle]

PATH = (PathEntry(b"tenant", -1),)


def test_a_second_request_gets_the_whole_blocks_of_the_first(serve: Serve) -> None:
    cache = PrefixCache(16, 2)
    serve(cache, PATH, [1, 2, 3, 4, 5])
    assert cache.match(PATH, [1, 2, 3, 4, 5, 6]) == 4
    handle = cache.acquire(PATH, [1, 2, 3, 4, 5, 6])
    assert (handle.num_tokens, handle.block_ids, handle.num_tree_blocks) == (4, [1, 2], 2)


def test_one_token_is_always_left_to_compute(serve: Serve) -> None:
    cache = PrefixCache(16, 2)
    serve(cache, PATH, [1, 2, 3, 4])
    assert cache.match(PATH, [1, 2, 3, 4]) == 2
    assert cache.match(PATH, [1, 2, 3, 4, 5]) == 4
    assert cache.match(PATH, []) == 0


def test_lists_and_arrays_of_tokens_match_alike(serve: Serve) -> None:
    cache = PrefixCache(16, 2)
    serve(cache, PATH, array("i", [1, 2, 3, 4]))
    assert cache.match(PATH, [1, 2, 3, 4, 5]) == cache.match(PATH, array("i", [1, 2, 3, 4, 5])) == 4
    assert cache.match(PATH, array("q", [1, 2, 3, 4, 5])) == 4


def test_match_changes_neither_tree_nor_order(serve: Serve) -> None:
    cache = PrefixCache(4, 2)
    serve(cache, PATH, [1, 1])
    serve(cache, PATH, [2, 2])
    before = invariants.dump(cache)
    assert cache.match(PATH, [1, 1, 0]) == 2
    assert invariants.dump(cache) == before
    cache.allocate(2)
    assert cache.match(PATH, [1, 1, 0]) == 0, "the match made the colder leaf warm"


def test_a_match_inside_an_edge_splits_it_and_protects_the_front_only(serve: Serve) -> None:
    cache = PrefixCache(16, 2)
    serve(cache, PATH, [1, 2, 3, 4, 5, 6])
    handle = cache.acquire(PATH, [1, 2, 9, 9])
    assert cache.num_evictable == 2
    invariants.check(cache, [handle])
    cache.release(handle, handle.block_ids)
    assert cache.num_evictable == 3


def test_the_front_of_a_split_edge_keeps_its_worth(serve: Serve) -> None:
    cache = PrefixCache(8, 2)
    serve(cache, PATH, [1, 2, 3, 4])
    handle = cache.acquire(PATH, [1, 2, 9])
    cache.release(handle, handle.block_ids)
    cache.free(cache.allocate(6) or [])
    serve(cache, PATH, [7, 7], priority=20)
    cache.allocate(6)
    assert cache.match(PATH, [1, 2, 9]) == 2
    assert cache.match(PATH, [7, 7, 9]) == 0


def test_a_split_inside_a_held_edge_keeps_the_first_handle_whole(start: Start) -> None:
    """The old node keeps the tail, so a handle on its end is as good as before (sglang #35270, mllm #656)."""
    cache = PrefixCache(16, 2)
    first, result = start(cache, PATH, [1, 2, 3, 4, 5, 6])
    second = cache.acquire(PATH, [1, 2, 3, 0])
    invariants.check(cache, [first, second])
    assert cache.num_evictable == 0
    cache.release(second, second.block_ids)
    invariants.check(cache, [first])
    assert cache.num_evictable == 0
    cache.release(first, result.block_ids)
    invariants.check(cache, [])
    assert (cache.num_evictable, cache.num_free) == (3, 12)


def test_allocation_evicts_what_is_cold_and_never_what_is_held(serve: Serve, start: Start) -> None:
    cache = PrefixCache(8, 2)
    serve(cache, PATH, [1, 1, 1, 1])
    held, result = start(cache, PATH, [2, 2, 2, 2])
    assert cache.available(SHARED) == 5
    assert cache.allocate(6) is None
    assert cache.match(PATH, [1, 1, 1, 1, 0]) == 4, "a refused allocation evicted something"
    blocks = cache.allocate(5)
    assert blocks is not None
    assert not set(blocks) & set(result.block_ids)
    assert cache.match(PATH, [1, 1, 1, 1, 0]) == 0
    assert cache.match(PATH, [2, 2, 2, 2, 0]) == 4
    invariants.check(cache, [held])


def test_an_allocation_of_nothing_is_an_empty_list() -> None:
    assert PrefixCache(4, 2).allocate(0) == []


def test_only_committed_tokens_are_inserted() -> None:
    """Law 6: the token whose KV is not written, drafts and steps in flight stay out (sglang #35470)."""
    cache = PrefixCache(16, 2)
    tokens = [1, 2, 3, 4, 5, 6]
    handle, table = cache.acquire(PATH, tokens), cache.allocate(3) or []
    for num_committed, inserted in [(0, 0), (1, 0), (3, 1), (3, 0), (4, 1), (5, 0)]:
        result = cache.commit(handle, tokens, table, num_committed)
        assert result.num_inserted_blocks == inserted
        assert cache.match(PATH, [*tokens, 7]) == num_committed // 2 * 2
    invariants.check(cache, [handle])


@pytest.mark.parametrize("num_committed", [5, 7])
def test_more_committed_tokens_than_tokens_or_blocks_are_refused(num_committed: int) -> None:
    cache = PrefixCache(16, 2)
    handle, table = cache.acquire(PATH, [1, 2, 3, 4, 5, 6]), cache.allocate(2) or []
    with pytest.raises(ValueError, match="committed"):
        cache.commit(handle, [1, 2, 3, 4, 5, 6], table, num_committed)


def test_chunks_of_one_prompt_grow_one_edge(serve: Serve) -> None:
    cache = PrefixCache(64, 2)
    tokens = list(range(40))
    handle, table = cache.acquire(PATH, tokens), cache.allocate(20) or []
    for num_committed in range(0, 41, 2):
        cache.commit(handle, tokens, table, num_committed)
    assert len(list(cache.owners.tree.nodes())) == 2
    invariants.check(cache, [handle])


def test_an_edge_does_not_grow_under_a_handle_that_ends_there(start: Start) -> None:
    """A fork's end would silently move and it would commit its own tokens behind the other's."""
    cache = PrefixCache(16, 2)
    first, result = start(cache, PATH, [1, 2])
    second = cache.fork(first)
    for handle, token in ((first, 7), (second, 8)):
        table = [*result.block_ids, *(cache.allocate(1) or [])]
        cache.commit(handle, [1, 2, token, token], table, 4)
        invariants.check(cache, [first, second])
    assert cache.match(PATH, [1, 2, 7, 7, 0]) == 4
    assert cache.match(PATH, [1, 2, 8, 8, 0]) == 4
    assert cache.match(PATH, [1, 2, 7, 7, 8, 8, 0]) == 4


def test_duplicates_are_replaced_by_the_trees_blocks_and_freed(start: Start) -> None:
    cache = PrefixCache(16, 2)
    late = cache.acquire(PATH, [1, 2, 3, 4, 5, 6])
    mine = cache.allocate(3) or []
    first, theirs = start(cache, PATH, [1, 2, 3, 4])
    result = cache.commit(late, [1, 2, 3, 4, 5, 6], mine, 6)
    assert result.block_ids == [*theirs.block_ids, mine[2]]
    assert result.freed_duplicates == (mine[0], mine[1])
    assert (result.num_inserted_blocks, result.num_tree_blocks) == (1, 3)
    assert cache.num_free == 12
    assert mine == [1, 2, 3], "the caller's own list was changed"
    invariants.check(cache, [first, late])


def test_deferred_duplicates_are_the_callers_to_free(start: Start) -> None:
    """The device may still read them in the step in flight."""
    cache = PrefixCache(16, 2)
    late, mine = cache.acquire(PATH, [1, 2]), cache.allocate(1) or []
    start(cache, PATH, [1, 2])
    result = cache.commit(late, [1, 2], mine, 2, deferred=True)
    assert result.freed_duplicates == tuple(mine)
    assert cache.num_free == 13
    cache.free(result.freed_duplicates)
    assert cache.num_free == 14
    invariants.check(cache)


def test_a_commit_that_ends_inside_an_edge_protects_the_front_only(serve: Serve) -> None:
    cache = PrefixCache(16, 2)
    handle, mine = cache.acquire(PATH, [1, 2, 3, 4, 5, 6]), cache.allocate(3) or []
    serve(cache, PATH, [1, 2, 3, 4, 5, 6])
    cache.commit(handle, [1, 2, 3, 4, 5, 6], mine, 2)
    assert cache.num_evictable == 2
    invariants.check(cache, [handle])


def test_without_write_nothing_enters_the_tree_and_all_comes_back(start: Start) -> None:
    cache = PrefixCache(16, 2)
    handle, result = start(cache, PATH, [1, 2, 3, 4], write=False)
    assert (result.num_inserted_blocks, result.num_tree_blocks) == (0, 0)
    assert cache.match(PATH, [1, 2, 3, 4, 5]) == 0
    cache.release(handle, result.block_ids)
    assert (cache.num_free, cache.num_evictable) == (15, 0)


def test_without_read_nothing_is_taken_but_equal_blocks_are_still_found_at_commit(start: Start, serve: Serve) -> None:
    cache = PrefixCache(16, 2)
    serve(cache, PATH, [1, 2, 3, 4])
    handle, result = start(cache, PATH, [1, 2, 3, 4], read=False)
    assert (handle.num_tokens, handle.miss_reason) == (0, "opt_out")
    assert len(result.freed_duplicates) == 2
    assert result.num_inserted_blocks == 0


def test_output_is_evicted_before_prompts_that_are_older(serve: Serve) -> None:
    cache = PrefixCache(8, 2)
    serve(cache, PATH, [1, 1, 1, 1])
    serve(cache, PATH, [2, 2, 3, 3, 4, 4], prompt_len=3)
    cache.allocate(2 + 2)
    assert cache.match(PATH, [1, 1, 1, 1, 0]) == 4
    assert cache.match(PATH, [2, 2, 3, 3, 4, 4, 0]) == 2, "the block with the first output token is output"


def test_output_committed_later_does_not_grow_the_prompts_edge(start: Start) -> None:
    cache = PrefixCache(9, 2)
    handle, result = start(cache, PATH, [1, 1], prompt_len=2)
    table = [*result.block_ids, *(cache.allocate(2) or [])]
    for num_committed in (4, 6):
        result = cache.commit(handle, [1, 1, 2, 2, 3, 3], table, num_committed, prompt_len=2)
    cache.release(handle, result.block_ids)
    assert [cache.owners.protection.priority(node) for node in cache.owners.tree.nodes()] == [0, 50, 40]
    invariants.check(cache, [])


def test_batch_is_evicted_before_interactive_output(serve: Serve) -> None:
    cache = PrefixCache(8, 2)
    serve(cache, PATH, [1, 1, 2, 2], prompt_len=2)
    serve(cache, PATH, [3, 3, 3, 3], priority=20)
    cache.allocate(3 + 2)
    assert cache.match(PATH, [1, 1, 2, 2, 0]) == 4
    assert cache.match(PATH, [3, 3, 3, 3, 0]) == 0


def test_a_hit_raises_what_a_batch_wrote(serve: Serve) -> None:
    cache = PrefixCache(8, 2)
    serve(cache, PATH, [3, 3, 3, 3], priority=20)
    handle = cache.acquire(PATH, [3, 3, 3, 3, 0], priority=50)
    cache.release(handle, handle.block_ids)
    serve(cache, PATH, [1, 1, 1, 1], priority=40)
    cache.allocate(3 + 2)
    assert cache.match(PATH, [3, 3, 3, 3, 0]) == 4
    invariants.check(cache, [])


def test_the_last_user_decides_how_warm_a_leaf_is(serve: Serve) -> None:
    cache = PrefixCache(8, 2)
    for token in (1, 2, 3):
        serve(cache, PATH, [token, token])
    handle = cache.acquire(PATH, [1, 1, 0])
    cache.release(handle, handle.block_ids)
    cache.allocate(4 + 1)
    assert [cache.match(PATH, [token, token, 0]) for token in (1, 2, 3)] == [2, 0, 2]


def test_a_leaf_is_truncated_from_its_tail_when_less_is_needed(serve: Serve) -> None:
    cache = PrefixCache(8, 2)
    serve(cache, PATH, [1, 2, 3, 4, 5, 6, 7, 8])
    cache.allocate(3 + 1)
    assert cache.match(PATH, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 6
    invariants.check(cache, [])


def test_a_parent_left_bare_becomes_a_leaf_and_can_go_too(serve: Serve) -> None:
    cache = PrefixCache(8, 2)
    serve(cache, PATH, [1, 1, 2, 2])
    serve(cache, PATH, [1, 1, 3, 3])
    assert cache.num_evictable == 3
    assert len(cache.allocate(7) or []) == 7
    assert len(list(cache.owners.tree.nodes())) == 1
    invariants.check(cache, [])


def test_forked_choices_hold_the_prefix_until_the_last_one_ends(start: Start) -> None:
    cache = PrefixCache(16, 2)
    first, result = start(cache, PATH, [1, 2, 3, 4])
    second = cache.fork(first)
    cache.release(first, result.block_ids)
    assert cache.num_evictable == 0
    invariants.check(cache, [second])
    cache.release(second, second.block_ids + result.block_ids)
    assert cache.num_evictable == 2


def test_a_block_shared_by_choices_is_inserted_by_the_first_and_found_by_the_others() -> None:
    cache = PrefixCache(16, 2)
    tokens = [1, 2, 3, 4]
    first, table = cache.acquire(PATH, tokens), cache.allocate(2) or []
    second = cache.fork(first)
    cache.share(table)
    assert cache.commit(first, tokens, table, 4).num_inserted_blocks == 2
    invariants.check(cache, [first, second])
    cache.release(first, table)
    assert cache.num_evictable == 0, "the other choice's table still names these blocks"
    invariants.check(cache, [second])
    result = cache.commit(second, tokens, table, 4)
    assert (result.num_inserted_blocks, result.num_tree_blocks, result.block_ids) == (0, 2, table)
    assert result.freed_duplicates == ()
    cache.release(second, table)
    assert (cache.num_evictable, cache.num_free) == (2, 13)
    invariants.check(cache, [])


def test_a_shared_block_found_in_place_is_not_a_duplicate_even_if_frees_are_deferred() -> None:
    cache = PrefixCache(16, 2)
    first, table = cache.acquire(PATH, [1, 2]), cache.allocate(1) or []
    second = cache.fork(first)
    cache.share(table)
    cache.commit(first, [1, 2], table, 2, deferred=True)
    assert cache.commit(second, [1, 2], table, 2, deferred=True).freed_duplicates == ()
    assert cache.refcount(table[0]) == 1
    cache.release(first, table)
    cache.release(second, table)
    assert cache.num_evictable == 1
    invariants.check(cache, [])


def test_a_choice_that_never_commits_its_shared_blocks_gives_them_back(start: Start) -> None:
    cache = PrefixCache(16, 2)
    first, table = cache.acquire(PATH, [1, 2, 3, 4]), cache.allocate(2) or []
    second = cache.fork(first)
    cache.share(table)
    cache.commit(first, [1, 2, 3, 4], table, 4)
    third = cache.acquire(PATH, [1, 2, 0])
    invariants.check(cache, [first, second, third])
    for handle, held in ((first, table), (third, third.block_ids), (second, table)):
        cache.release(handle, held)
        invariants.check(cache)
    assert (cache.num_evictable, cache.num_free) == (2, 13)


def test_a_second_release_raises_and_changes_nothing(start: Start) -> None:
    cache = PrefixCache(16, 2)
    handle, result = start(cache, PATH, [1, 2, 3])
    cache.release(handle, result.block_ids)
    before = invariants.dump(cache)
    with pytest.raises(RuntimeError, match="released already"):
        cache.release(handle, result.block_ids)
    assert invariants.dump(cache) == before


def test_a_released_handle_can_neither_commit_nor_fork_nor_pin(start: Start) -> None:
    cache = PrefixCache(16, 2)
    handle, result = start(cache, PATH, [1, 2, 3])
    cache.release(handle, result.block_ids)
    with pytest.raises(RuntimeError):
        cache.commit(handle, [1, 2, 3], result.block_ids, 3)
    with pytest.raises(RuntimeError):
        cache.fork(handle)
    with pytest.raises(RuntimeError):
        cache.pin(handle)


def test_a_table_shorter_than_its_tree_part_cannot_be_released(start: Start) -> None:
    cache = PrefixCache(16, 2)
    handle, result = start(cache, PATH, [1, 2, 3, 4])
    with pytest.raises(ValueError, match="tree blocks"):
        cache.release(handle, result.block_ids[:1])
    cache.release(handle, result.block_ids)


@pytest.mark.parametrize("operation", ["free", "share"])
def test_no_table_owns_a_block_of_the_tree(serve: Serve, operation: str) -> None:
    cache = PrefixCache(16, 2)
    serve(cache, PATH, [1, 2])
    with pytest.raises(RuntimeError, match="belongs to the tree"):
        getattr(cache, operation)([1])
    invariants.check(cache, [])


def test_blocks_behind_a_null_block_stay_private() -> None:
    """A private block that left the attention window was freed and its place holds the null block."""
    cache = PrefixCache(16, 2)
    handle, table = cache.acquire(PATH, [1, 2, 3, 4, 5, 6]), cache.allocate(3) or []
    cache.free([table[1]])
    table[1] = 0
    result = cache.commit(handle, [1, 2, 3, 4, 5, 6], table, 6)
    assert result.num_tree_blocks == 1
    cache.release(handle, result.block_ids)
    assert (cache.num_free, cache.num_evictable) == (14, 1)


def test_results_do_not_depend_on_hashes(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every hash equal (CVE-2025-25183 in the extreme) only the miss reason may be wrong."""
    monkeypatch.setattr(radix, "chain_hash", lambda previous, region, block: 1)
    cache = PrefixCache(8, 2)
    serve(cache, PATH, [1, 1, 2, 2, 3, 3])
    cache.allocate(4 + 1)
    assert cache.match(PATH, [1, 1, 2, 2, 3, 3, 0]) == 4
    handle = cache.acquire(PATH, [7, 7, 7])
    assert (handle.num_tokens, handle.block_ids, handle.miss_reason) == (0, [], "evicted")


def test_a_pool_or_block_size_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="null block"):
        PrefixCache(1, 2)
    with pytest.raises(ValueError, match="block_size"):
        PrefixCache(8, 0)
