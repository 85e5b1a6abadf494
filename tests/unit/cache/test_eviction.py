from __future__ import annotations

from array import array
from typing import ClassVar

import pytest

from cache.blocks.eviction import LeafHeap
from cache.prefix_cache import PrefixCache
from cache.tree.namespaces import PathEntry
from cache.tree.radix import Node

PATH = (PathEntry(b"tenant", -1),)


def test_the_order_is_priority_then_last_use_then_id() -> None:
    heap = LeafHeap()
    order = [(20, 5, 9), (40, 1, 4), (40, 2, 1), (40, 2, 2), (50, 0, 0)]
    for priority, last_used, node_id in reversed(order):
        heap.push(Node(node_id, None, b""), priority, last_used)
    popped = []
    while (entry := heap.coldest()) is not None:
        popped.append(entry[:3])
        assert heap.discard(entry[3])
    assert popped == order


def test_a_discarded_leaf_is_skipped_and_can_return_warmer() -> None:
    heap = LeafHeap()
    first, second = Node(1, None, b""), Node(2, None, b"")
    heap.push(first, 50, 1)
    heap.push(second, 50, 2)
    assert heap.discard(first)
    assert not heap.discard(first)
    assert heap.coldest() == (50, 2, 2, second)
    heap.push(first, 50, 3)
    assert heap.coldest() == (50, 2, 2, second)
    assert {entry[3] for entry in heap.live()} == {first, second}


def test_stale_entries_never_outnumber_live_ones_by_much() -> None:
    heap = LeafHeap()
    nodes = [Node(i, None, b"") for i in range(10)]
    for node in nodes:
        heap.push(node, 50, node.id)
    for _ in range(1000):
        heap.discard(nodes[3])
        heap.push(nodes[3], 50, 3)
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
        cache.begin_step()
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
        cache.begin_step()
    nodes = list(cache.owners.tree.nodes())
    num_blocks = cache.num_blocks - 1 - cache.num_free
    assert sum(len(node.block_ids) for node in nodes) == num_blocks
    assert sum(len(node.tokens) for node in nodes) == 2 * num_blocks
    assert sum(len(node.hashes) for node in nodes) == num_blocks
    assert len(nodes) <= num_blocks + 1
