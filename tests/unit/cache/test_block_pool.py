from __future__ import annotations

import pytest

from cache.blocks.block_pool import BlockPool


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(8)
    assert sorted(pool.alloc(7) or []) == [1, 2, 3, 4, 5, 6, 7]
    assert pool.alloc(1) is None


def test_an_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(8)
    assert pool.alloc(8) is None
    assert pool.num_free == 7


def test_the_block_freed_last_is_taken_first() -> None:
    pool = BlockPool(8)
    first, second = pool.alloc(2) or []
    pool.free(second)
    pool.free(first)
    assert pool.alloc(2) == [first, second]


def test_a_shared_block_returns_with_its_last_owner() -> None:
    pool = BlockPool(4)
    (block,) = pool.alloc(1) or []
    pool.share(block)
    assert pool.refcount(block) == 2
    assert pool.free(block) == 1
    assert pool.num_free == 2
    assert pool.free(block) == 0
    assert pool.num_free == 3


def test_a_double_free_raises_and_changes_nothing() -> None:
    pool = BlockPool(4)
    (block,) = pool.alloc(1) or []
    pool.free(block)
    with pytest.raises(RuntimeError, match="freed twice"):
        pool.free(block)
    assert pool.num_free == 3


@pytest.mark.parametrize("operation", ["share", "free"])
def test_the_null_block_has_no_owners(operation: str) -> None:
    with pytest.raises(RuntimeError):
        getattr(BlockPool(4), operation)(0)


def test_a_free_block_cannot_be_shared() -> None:
    with pytest.raises(RuntimeError, match="no owner"):
        BlockPool(4).share(1)


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="null block"):
        BlockPool(1)
    with pytest.raises(ValueError, match="-1"):
        BlockPool(4).alloc(-1)
