from __future__ import annotations

from array import array

import pytest

from cache.tree import radix
from cache.tree.namespaces import PathEntry, segments
from cache.tree.radix import RadixTree, common_tokens

PATH = segments((PathEntry(b"r", -1),), 2)


def walk(tree: RadixTree, tokens: list[int]) -> tuple[list[int], int, int]:
    found = tree.walk(PATH, tokens, len(tokens) // 2, tree.root, 0)
    above = found.node.parent or tree.root
    ids = tree.ids_between(tree.root, above) + list(found.node.block_ids[: found.num_in_edge])
    return ids, found.num_blocks, found.num_tokens


@pytest.mark.parametrize("differs", [0, 1, 63, 64, 65, 319, 320, 1000, 4095, 4096])
def test_common_tokens_is_exact_wherever_the_difference_lies(differs: int) -> None:
    edge = array("i", range(4096))
    tokens = [9, *range(4096)]
    if differs < 4096:
        tokens[1 + differs] = -1
    assert common_tokens(edge, tokens, 1, 4096) == differs
    assert common_tokens(edge, array("i", tokens), 1, 4096) == differs


def test_common_tokens_stops_at_the_length_asked_for() -> None:
    edge = array("i", range(100))
    assert common_tokens(edge, edge, 0, 0) == 0
    assert common_tokens(edge, edge, 0, 65) == 65


def test_a_walk_ends_inside_an_edge_at_a_whole_block_and_names_the_token() -> None:
    tree = RadixTree(2)
    tree.add_child(tree.root, b"r", array("i", [1, 2, 3, 4, 5, 6]), [7, 8, 9])
    assert walk(tree, [1, 2, 3, 4, 5, 0]) == ([7, 8], 2, 5)
    assert walk(tree, [1, 0, 3, 4]) == ([], 0, 0)


def test_a_split_gives_the_front_to_a_new_node_and_the_old_one_keeps_the_tail() -> None:
    tree = RadixTree(2)
    tail = tree.add_child(tree.root, b"r", array("i", [1, 2, 3, 4, 5, 6]), [7, 8, 9])
    end_hash = tail.end_hash
    upper = tree.split(tail, 1)
    assert (list(upper.tokens), list(upper.block_ids)) == ([1, 2], [7])
    assert (list(tail.tokens), list(tail.block_ids)) == ([3, 4, 5, 6], [8, 9])
    assert tail.parent is upper
    assert upper.parent is tree.root
    assert tail.end_hash == end_hash
    assert walk(tree, [1, 2, 3, 4, 5, 6]) == ([7, 8, 9], 3, 6)


def test_a_split_leaves_no_storage_shared_or_overallocated() -> None:
    """Memory of the two halves is that of the edge: nothing keeps the long array alive (sglang #17191)."""
    tree = RadixTree(2)
    node = tree.add_child(tree.root, b"r", array("i", range(2000)), list(range(1000)))
    for _ in range(999):
        tree.split(node, 1)
    sizes = [len(n.tokens.tobytes()) for n in tree.nodes() if n.parent is not None]
    assert sizes == [8] * 1000
    assert all(n.tokens.buffer_info()[1] == 2 for n in tree.nodes() if n.parent is not None)


def test_the_hash_of_a_block_does_not_depend_on_where_edges_were_split() -> None:
    whole, parts = RadixTree(2), RadixTree(2)
    long = whole.add_child(whole.root, b"r", array("i", [1, 2, 3, 4]), [1, 2])
    upper = parts.add_child(parts.root, b"r", array("i", [1, 2]), [1])
    lower = parts.add_child(upper, b"r", array("i", [3, 4]), [2])
    assert list(long.hashes) == [upper.end_hash, lower.end_hash]


def test_equal_tokens_in_another_region_are_another_child() -> None:
    tree = RadixTree(2)
    tree.add_child(tree.root, b"other", array("i", [1, 2]), [7])
    assert tree.child(tree.root, b"r", [1, 2], 0) is None
    assert walk(tree, [1, 2, 3, 4]) == ([], 0, 0)


def test_a_tree_that_hashes_everything_alike_still_compares_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(radix, "chain_hash", lambda previous, region, block: 1)
    tree = RadixTree(2)
    tree.add_child(tree.root, b"r", array("i", [1, 2]), [7])
    tree.add_child(tree.root, b"r", array("i", [3, 4]), [8])
    assert walk(tree, [3, 4, 5, 6])[0] == [8]
    assert walk(tree, [5, 6, 7, 8])[0] == []


def test_a_block_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="block_size"):
        RadixTree(0)
