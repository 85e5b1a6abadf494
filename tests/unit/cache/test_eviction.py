from __future__ import annotations

from array import array
from typing import ClassVar

import pytest

from cache.blocks.eviction import LeafHeap
from cache.prefix_cache import PrefixCache
from cache.tree.namespaces import PathEntry
from cache.tree.radix import Node

PATH = (PathEntry(b"tenant", -1),)


def leaf(node_id: int, priority: int, last_used: int) -> Node:
    node = Node(node_id, None, b"")
    node.priority, node.last_used = priority, last_used
    return node


def test_the_order_is_priority_then_last_use_then_id() -> None:
    heap = LeafHeap()
    order = [leaf(9, 20, 5), leaf(4, 40, 1), leaf(1, 40, 2), leaf(2, 40, 2), leaf(0, 50, 0)]
    for node in reversed(order):
        heap.push(node)
    popped = []
    for _ in order:
        popped.append(heap.coldest())
        heap.discard(popped[-1])
    assert popped == order


def test_a_discarded_leaf_is_skipped_and_can_return_warmer() -> None:
    heap = LeafHeap()
    first, second = leaf(1, 50, 1), leaf(2, 50, 2)
    heap.push(first)
    heap.push(second)
    heap.discard(first)
    assert heap.coldest() is second
    first.last_used = 3
    heap.push(first)
    assert heap.coldest() is second


def test_stale_entries_never_outnumber_live_ones_by_much() -> None:
    heap = LeafHeap()
    nodes = [leaf(i, 50, i) for i in range(10)]
    for node in nodes:
        heap.push(node)
    for _ in range(1000):
        heap.discard(nodes[3])
        heap.push(nodes[3])
    assert len(heap.entries()) <= 2 * heap.num_live + 65
    assert heap.num_live == 10


class CountedInt(int):
    """A priority that counts how often the heap compares it."""

    compared: ClassVar[int] = 0

    def __lt__(self, other: int) -> bool:
        CountedInt.compared += 1
        return int(self) < int(other)

    def __eq__(self, other: object) -> bool:
        CountedInt.compared += 1
        return int(self) == other

    __hash__ = int.__hash__


def comparisons_per_leaf(num_leaves: int) -> float:
    CountedInt.compared = 0
    cache = PrefixCache(num_leaves + 1, 1)
    for token in range(num_leaves):
        handle, table = cache.acquire(PATH, [token, 0]), cache.allocate(1) or []
        cache.commit(handle, [token, 0], table, 1, priority=CountedInt(50))
        cache.release(handle, table)
        cache.tick()
    assert cache.allocate(num_leaves) is not None
    return CountedInt.compared / num_leaves


def test_the_cost_of_an_eviction_grows_with_the_logarithm_of_the_tree() -> None:
    """Comparisons over a leaf's whole life, not time: a scan or a sort per leaf multiplies them by 16 here
    (sglang PR #14339)."""
    small, large = comparisons_per_leaf(250), comparisons_per_leaf(4000)
    assert small > 0
    assert large < 2.5 * small


@pytest.mark.parametrize("num_rounds", [200])
def test_memory_of_the_tree_is_linear_in_its_blocks(num_rounds: int) -> None:
    """After many splits, truncations and returns: tokens, ids and hashes are exactly those of the blocks held."""
    cache = PrefixCache(64, 2)
    for n in range(num_rounds):
        tokens = array("i", [n % 3, n % 5, n % 7] * 6)
        handle = cache.acquire(PATH, tokens)
        private = cache.allocate(9 - handle.num_tree_blocks) or []
        result = cache.commit(handle, tokens, [*handle.block_ids, *private], 18)
        cache.release(handle, result.block_ids)
        cache.tick()
    nodes = list(cache.owners.tree.nodes())
    num_blocks = cache.num_blocks - 1 - cache.num_free
    assert sum(len(node.block_ids) for node in nodes) == num_blocks
    assert sum(len(node.tokens) for node in nodes) == 2 * num_blocks
    assert sum(len(node.hashes) for node in nodes) == num_blocks
    assert len(nodes) <= num_blocks + 1
