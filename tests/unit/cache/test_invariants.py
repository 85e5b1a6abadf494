"""Each law can fail: a state broken by hand is named, with a dump. A check that cannot fail proves nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cache import invariants
from cache.host.tiers import HostTier
from cache.prefix_cache import PrefixCache
from cache.tree.handle import CommitResult, Handle
from cache.tree.namespaces import PathEntry
from cache.tree.radix import Node

Start = Callable[..., tuple[Handle, CommitResult]]
Serve = Callable[..., Handle]
PATH = (PathEntry(b"tenant", -1),)


def leaf(cache: PrefixCache) -> Node:
    return list(cache.owners.tree.nodes())[-1]


def free_stack(cache: PrefixCache) -> list[int]:
    return cache.owners.pool._free


def break_count(cache: PrefixCache) -> None:
    cache.owners.pool._counts[5] = 1


def break_evictable(cache: PrefixCache) -> None:
    cache.owners.usage.num_evictable += 1


def break_mark(cache: PrefixCache) -> None:
    cache.owners.in_tree[1] = 0


def break_guest(cache: PrefixCache) -> None:
    cache.owners.pool._counts[1] = 2


def break_protectors(cache: PrefixCache) -> None:
    cache.owners.protection.of(cache.owners.tree.root).num_protectors -= 1


def break_guest_tally(cache: PrefixCache) -> None:
    cache.owners.guests._counts[leaf(cache)] = 1


def break_entry(cache: PrefixCache) -> None:
    cache.owners.protection.recent.heaps[""].discard(leaf(cache))


def break_entry_key(cache: PrefixCache) -> None:
    cache.owners.protection.of(leaf(cache)).priority += 1


def break_heap(cache: PrefixCache) -> None:
    cache.owners.protection.recent.heaps[""].entries().clear()


def break_heaps(cache: PrefixCache) -> None:
    cache.owners.protection.recent.heaps[""].push(cache.owners.tree.root, 50, 0)


def break_tenant(cache: PrefixCache) -> None:
    cache.owners.usage.change("", held=1, retained=-1)


def break_tokens(cache: PrefixCache) -> None:
    leaf(cache).tokens.append(1)


def break_edge(cache: PrefixCache) -> None:
    node = leaf(cache)
    del node.tokens[:], node.block_ids[:], node.hashes[:]


def break_key(cache: PrefixCache) -> None:
    leaf(cache).tokens[0] += 1


def break_region(cache: PrefixCache) -> None:
    tree = cache.owners.tree
    beyond = tree.add_child(leaf(cache), b"other", [1, 2], [9])
    for node in (beyond, tree.add_child(beyond, b"tenant", [1, 2], [10])):
        cache.owners.protection.inserted(node, 0)


def break_standing(cache: PrefixCache) -> None:
    cache.owners.tree.add_child(leaf(cache), b"tenant", [1, 2], [9])


def break_doomed(cache: PrefixCache) -> None:
    cache.owners.protection.doomed.add(gone(cache))


def break_tables(cache: PrefixCache) -> None:
    gone(cache)


def gone(cache: PrefixCache) -> Node:
    """A node that the protection still knows although it is in no tree."""
    node = Node(99, None, b"")
    cache.owners.protection.inserted(node, 50)
    return node


def break_offers(cache: PrefixCache) -> None:
    assert cache.owners.offers is not None
    cache.owners.offers._offered[leaf(cache)] = 3


def break_removal(table: str) -> Callable[[PrefixCache], None]:
    """A table that does not hear that its node is gone."""

    def breaks(cache: PrefixCache) -> None:
        node = leaf(cache)
        if table == "Pins":
            cache.owners.pins.lapsed.add(node)
        elif table == "Guests":
            cache.owners.guests._counts[node] = 1
        elif table == "OffloadPolicy":
            assert cache.owners.offers is not None
            cache.owners.offers.hit(node)
        for one in (cache.owners.protection, cache.owners.pins, cache.owners.offers):
            if type(one).__name__ == table:
                vars(one)["removed"] = lambda _: None
        assert cache.allocate(15) is not None

    return breaks


@pytest.mark.parametrize(
    ("breaks", "law"),
    [
        (lambda cache: free_stack(cache).append(1), r"\(1\) blocks in two places"),
        (lambda cache: free_stack(cache).append(0), r"\(1\) the null block"),
        (lambda cache: free_stack(cache).remove(7), r"\(1\) block 7 has 0 owners and is not free"),
        (break_count, r"\(1\) block 5 has 1 owners and is free"),
        (break_evictable, r"\(1\) 2 blocks are evictable"),
        (break_mark, r"\(1\) block 1: the in_tree mark"),
        (break_guest, r"\(1\) tree block 1 has 2 owners"),
        (break_protectors, r"\(2\) Node\(0"),
        (break_guest_tally, r"\(2\) the nodes have Counter\(\) guests"),
        (break_doomed, r"\(2\) .* nobody holds it"),
        (break_heap, r"\(3\) the heap of '' lacks a live entry"),
        (break_heaps, r"\(3\) Node\(0.* sits in a heap"),
        (break_entry, r"\(3\) .* evictable leaf True, entry False"),
        (break_entry_key, r"\(3\) .* sits in the heap as"),
        (break_tokens, r"\(4\) .* 5 tokens"),
        (break_edge, r"\(4\) .* empty edge"),
        (break_key, r"\(4\) .* wrong place"),
        (break_region, r"\(5\)"),
        (break_offers, r"\(11\) .* offered more"),
        (break_standing, r"\(12\) Node\(2.* has no standing"),
        (break_tables, r"\(12\) Protection names Node\(99"),
        (break_removal("Protection"), r"\(12\) Protection names Node\(1"),
        (break_removal("Pins"), r"\(12\) Pins names Node\(1"),
        (break_removal("Guests"), r"\(12\) Guests names Node\(1"),
        (break_removal("OffloadPolicy"), r"\(12\) OffloadPolicy names Node\(1"),
        (break_tenant, r"\(7\) '' has 0 held, 2 retained"),
    ],
)
def test_a_broken_law_is_named(breaks: Callable[[PrefixCache], None], law: str, serve: Serve) -> None:
    cache = PrefixCache(16, 2, host=HostTier(4, 2))
    serve(cache, PATH, [1, 2, 3, 4])
    breaks(cache)
    with pytest.raises(invariants.InvariantBroken, match=law) as caught:
        invariants.check(cache, [])
    assert "free:" in str(caught.value), "no dump of the state"


def test_a_handle_that_nobody_told_of_counts_as_a_broken_protector(start: Start) -> None:
    cache = PrefixCache(16, 2)
    handle, _ = start(cache, PATH, [1, 2, 3, 4])
    invariants.check(cache)
    invariants.check(cache, [handle])
    with pytest.raises(invariants.InvariantBroken, match=r"\(2\)"):
        invariants.check(cache, [])
    with pytest.raises(invariants.InvariantBroken, match=r"\(2\)"):
        invariants.check(cache, [handle, handle])


def test_a_handle_that_says_another_depth_is_named(start: Start) -> None:
    cache = PrefixCache(16, 2)
    handle, _ = start(cache, PATH, [1, 2, 3, 4])
    handle.num_tree_blocks = 1
    with pytest.raises(invariants.InvariantBroken, match=r"\(6\)"):
        invariants.check(cache, [handle])


def test_the_dump_shows_nodes_private_and_free_blocks(start: Start) -> None:
    cache = PrefixCache(8, 2)
    _, result = start(cache, PATH, [1, 2, 3])
    cache.drop(b"tenant")
    dump = invariants.dump(cache)
    assert "unlinked: Node(1" in dump
    assert f"{result.block_ids[1]}: 1" in dump
    assert "free: [3, 4, 5, 6, 7]" in dump


def test_a_slot_in_two_places_a_lost_count_and_a_moving_block_that_is_free_are_found():
    cache = PrefixCache(16, 2, host=HostTier(4, 2))
    assert cache.host is not None
    (slot,) = cache.host.reserve("anna", 1)
    invariants.check(cache, [])
    for spoil, undo in (
        (lambda: cache.host._free.append(slot), lambda: cache.host._free.remove(slot)),
        (lambda: cache.host._swapped.pop(slot), lambda: cache.host._swapped.update({slot: "anna"})),
        (lambda: cache.begin_move([3]), lambda: cache.end_move([3])),
    ):
        spoil()
        with pytest.raises(invariants.InvariantBroken):
            invariants.check(cache, [])
        undo()
    invariants.check(cache, [])
