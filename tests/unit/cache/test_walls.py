"""The walls between tenants. Each test comes in a pair: the other tenant gets nothing AND the same tenant gets
something; either half alone also passes when caching is broken."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cache import invariants
from cache.prefix_cache import PrefixCache
from cache.tree.handle import CommitResult, Handle
from cache.tree.namespaces import NamespacePath, PathEntry

Start = Callable[..., tuple[Handle, CommitResult]]
Serve = Callable[..., Handle]

OPERATOR = (PathEntry(b"public", -1),)
SYSTEM = [1, 2, 3, 4]


def alone(region: bytes) -> NamespacePath:
    return (PathEntry(region, -1),)


def behind_public(region: bytes, end: int = 4) -> NamespacePath:
    return (PathEntry(b"public", end), PathEntry(region, -1))


def test_another_tenants_blocks_are_not_found(serve: Serve) -> None:
    cache = PrefixCache(32, 2)
    serve(cache, alone(b"anna"), [1, 2, 3, 4])
    assert cache.match(alone(b"bert"), [1, 2, 3, 4, 5]) == 0
    assert cache.match(alone(b"anna"), [1, 2, 3, 4, 5]) == 4


def test_the_reason_never_says_that_another_tenant_has_it(serve: Serve) -> None:
    cache = PrefixCache(32, 2)
    serve(cache, alone(b"anna"), [1, 2, 3, 4])
    assert cache.acquire(alone(b"bert"), [1, 2, 3, 4, 5]).miss_reason == "cold"
    assert cache.acquire(alone(b"anna"), [1, 2, 3, 0, 5]).miss_reason == "diverged"


def test_an_eviction_is_the_evicted_tenants_business_alone(serve: Serve) -> None:
    cache = PrefixCache(8, 2)
    serve(cache, alone(b"anna"), [1, 2, 3, 4])
    cache.allocate(7)
    assert cache.acquire(alone(b"bert"), [1, 2, 3, 4, 5]).miss_reason == "cold"
    assert cache.acquire(alone(b"anna"), [1, 2, 3, 4, 5]).miss_reason == "evicted"


def test_all_tenants_share_what_the_operator_filled(serve: Serve) -> None:
    cache = PrefixCache(32, 2)
    serve(cache, OPERATOR, SYSTEM)
    for tenant in (b"anna", b"bert"):
        handle = cache.acquire(behind_public(tenant), [*SYSTEM, 5, 6, 7])
        assert (handle.num_tokens, handle.public_tokens, handle.block_ids) == (4, 4, [1, 2])


def test_what_lies_behind_the_public_part_is_the_tenants_own(serve: Serve) -> None:
    cache = PrefixCache(32, 2)
    serve(cache, OPERATOR, SYSTEM)
    serve(cache, behind_public(b"anna"), [*SYSTEM, 5, 6, 7])
    same = cache.acquire(behind_public(b"anna"), [*SYSTEM, 5, 6, 7])
    other = cache.acquire(behind_public(b"bert"), [*SYSTEM, 5, 6, 7])
    assert (same.num_tokens, same.public_tokens) == (6, 4)
    assert (other.num_tokens, other.public_tokens) == (4, 4)


def test_the_same_text_with_and_without_the_public_part_is_not_mixed(serve: Serve) -> None:
    cache = PrefixCache(32, 2)
    serve(cache, alone(b"anna"), [*SYSTEM, 5, 6])
    assert cache.match(behind_public(b"anna"), [*SYSTEM, 5, 6, 7]) == 0
    assert cache.match(alone(b"anna"), [*SYSTEM, 5, 6, 7]) == 6


def test_a_tenant_never_writes_the_public_region_nor_anything_behind_it(serve: Serve) -> None:
    cache = PrefixCache(32, 2)
    serve(cache, behind_public(b"anna"), [*SYSTEM, 5, 6, 7])
    assert cache.num_free == 31, "blocks without a parent stay private and are freed at the end"
    for path in (OPERATOR, behind_public(b"anna"), behind_public(b"bert")):
        assert cache.match(path, [*SYSTEM, 5, 6, 7]) == 0
    serve(cache, OPERATOR, SYSTEM)
    serve(cache, behind_public(b"anna"), [*SYSTEM, 5, 6, 7])
    assert cache.match(behind_public(b"anna"), [*SYSTEM, 5, 6, 7]) == 6


def test_a_fill_that_arrives_meanwhile_is_adopted_at_the_next_commit(start: Start, serve: Serve) -> None:
    cache = PrefixCache(32, 2)
    tokens = [*SYSTEM, 5, 6]
    handle, result = start(cache, behind_public(b"anna"), tokens)
    assert result.num_tree_blocks == 0
    serve(cache, OPERATOR, SYSTEM)
    later = cache.commit(handle, tokens, result.block_ids, 6)
    assert (later.num_tree_blocks, later.num_inserted_blocks) == (3, 1)
    assert later.freed_duplicates == tuple(result.block_ids[:2])
    invariants.check(cache, [handle])


def test_a_half_filled_public_part_keeps_the_tenants_blocks_private(start: Start, serve: Serve) -> None:
    cache = PrefixCache(32, 2)
    serve(cache, OPERATOR, SYSTEM[:2])
    handle, result = start(cache, behind_public(b"anna"), [*SYSTEM, 5, 6])
    assert handle.public_tokens == 2
    assert (result.num_inserted_blocks, result.num_tree_blocks) == (0, 1)
    invariants.check(cache, [handle])


def test_a_public_end_inside_a_block_is_rounded_down(serve: Serve) -> None:
    cache = PrefixCache(32, 2)
    serve(cache, OPERATOR, [1, 2, 3, 4])
    handle = cache.acquire(behind_public(b"anna", end=3), [1, 2, 3, 4, 5])
    assert (handle.num_tokens, handle.public_tokens) == (2, 2)
    serve(cache, behind_public(b"anna", end=3), [1, 2, 3, 4])
    assert cache.match(behind_public(b"anna", end=3), [1, 2, 3, 4, 5]) == 4
    assert cache.match(behind_public(b"bert", end=3), [1, 2, 3, 4, 5]) == 2


def test_a_public_part_shorter_than_a_block_is_no_part_at_all(serve: Serve) -> None:
    cache = PrefixCache(32, 2)
    serve(cache, behind_public(b"anna", end=1), [1, 2, 3])
    assert cache.match(alone(b"anna"), [1, 2, 3]) == 2
    assert cache.match(alone(b"bert"), [1, 2, 3]) == 0


def test_two_registered_prompts_of_which_one_begins_the_other(serve: Serve) -> None:
    cache = PrefixCache(32, 2)
    serve(cache, OPERATOR, [1, 2, 3, 4, 5, 6])
    serve(cache, behind_public(b"anna", end=4), [1, 2, 3, 4, 9, 9])
    serve(cache, behind_public(b"anna", end=6), [1, 2, 3, 4, 5, 6, 9, 9])
    assert cache.match(behind_public(b"anna", end=4), [1, 2, 3, 4, 9, 9, 0]) == 6
    assert cache.match(behind_public(b"anna", end=6), [1, 2, 3, 4, 5, 6, 9, 9, 0]) == 8
    assert cache.match(behind_public(b"bert", end=6), [1, 2, 3, 4, 5, 6, 9, 9, 0]) == 6


def test_three_levels_write_the_users_region_only(start: Start, serve: Serve) -> None:
    cache = PrefixCache(32, 2)
    path = (PathEntry(b"public", 2), PathEntry(b"anna", 4), PathEntry(b"user", -1))
    tokens = [1, 2, 3, 4, 5, 6]
    serve(cache, OPERATOR, [1, 2])
    serve(cache, path, tokens)
    assert cache.match(path, [*tokens, 7]) == 2
    serve(cache, behind_public(b"anna", end=2), tokens[:4])
    serve(cache, path, tokens)
    assert cache.match(path, [*tokens, 7]) == 6
    assert cache.match((*path[:2], PathEntry(b"someone else", -1)), [*tokens, 7]) == 4


@pytest.mark.parametrize("order", [(OPERATOR, behind_public(b"anna")), (behind_public(b"anna"), OPERATOR)])
def test_a_region_id_equal_to_nothing_else_decides_alone(order: tuple[NamespacePath, ...], serve: Serve) -> None:
    cache = PrefixCache(32, 2)
    for path in order:
        serve(cache, path, [*SYSTEM, 5, 6])
    assert cache.match(OPERATOR, [*SYSTEM, 5, 6, 7]) == 6
    assert cache.match(behind_public(b"bert"), [*SYSTEM, 5, 6, 7]) == 4
