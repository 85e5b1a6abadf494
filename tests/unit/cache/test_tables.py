"""Side tables follow the tree: what is known of an edge stays true of both halves, and goes with its node."""

from __future__ import annotations

from collections.abc import Callable

from cache import invariants
from cache.host.tiers import HostTier
from cache.prefix_cache import PrefixCache
from cache.tree.handle import CommitResult, Handle
from cache.tree.namespaces import PathEntry
from cache.tree.radix import Node

Start = Callable[..., tuple[Handle, CommitResult]]
Serve = Callable[..., Handle]
PATH = (PathEntry(b"tenant", -1),)
TOKENS = [1, 1, 2, 2, 3, 3, 4, 4]


def leaf(cache: PrefixCache) -> Node:
    return list(cache.owners.tree.nodes())[-1]


def split(cache: PrefixCache, serve: Serve) -> tuple[Node, Node]:
    """Leave the edge after its second block. Returns the halves."""
    tail = leaf(cache)
    serve(cache, PATH, [*TOKENS[:4], 9, 9])
    assert tail.parent is not None
    assert (len(tail.parent.block_ids), len(tail.block_ids)) == (2, 2)
    return tail.parent, tail


def test_offers_and_hits_of_an_edge_are_divided_as_its_blocks_are(start: Start, serve: Serve) -> None:
    cache = PrefixCache(16, 2, host=HostTier(8, 2))
    offers = cache.owners.offers
    assert offers is not None
    handle, done = start(cache, PATH, TOKENS[:6])
    offers.write(leaf(cache))
    cache.hit(handle)
    private = [*done.block_ids, *(cache.allocate(1) or [])]
    done = cache.commit(handle, TOKENS, private, 8)
    cache.release(handle, done.block_ids)
    assert offers.num_offered(leaf(cache)) == 3
    upper, tail = split(cache, serve)
    assert (offers.num_offered(upper), offers.num_offered(tail)) == (2, 1)
    assert (offers._hits[upper], offers._hits[tail]) == (1, 1)
    invariants.check(cache, [])


def test_offered_blocks_that_are_cut_are_offered_no_more(serve: Serve) -> None:
    cache = PrefixCache(5, 2, host=HostTier(8, 2))
    offers = cache.owners.offers
    assert offers is not None
    serve(cache, PATH, TOKENS)
    offers.write(leaf(cache))
    cache.allocate(3)
    assert offers.num_offered(leaf(cache)) == 1
    invariants.check(cache, [])


def test_both_halves_remember_a_pin_that_lapsed(start: Start, serve: Serve) -> None:
    now = [0]
    cache = PrefixCache(16, 2, pin_limit=64, now_ms=lambda: now[0])
    handle, done = start(cache, PATH, TOKENS)
    assert cache.pin_for(handle, 8, 100) == 4
    cache.release(handle, done.block_ids)
    now[0] = 200
    cache.begin_step()
    assert cache.owners.pins.lapsed >= set(split(cache, serve))
    cache.allocate(15)
    assert cache.acquire(PATH, [*TOKENS, 5]).miss_reason == "pin_expired"


def test_both_halves_of_a_pinned_edge_lie_under_the_pin(start: Start, serve: Serve) -> None:
    cache = PrefixCache(16, 2, pin_limit=64)
    handle, done = start(cache, PATH, TOKENS)
    assert cache.pin(handle) == 4
    cache.release(handle, done.block_ids)
    upper, tail = split(cache, serve)
    pins = cache.owners.pins
    assert (upper in pins, tail in pins, pins.covers(upper), pins.covers(tail)) == (False, True, 1, 1)
    invariants.check(cache, [])


def test_nothing_is_remembered_of_nodes_that_are_gone(start: Start, serve: Serve) -> None:
    cache = PrefixCache(16, 2, pin_limit=64, host=HostTier(8, 2))
    first, done = start(cache, PATH, TOKENS)
    choice = cache.fork(first)
    cache.share(table := cache.allocate(1) or [])
    cache.hit(first)
    cache.pin(first)
    held = cache.commit(first, [*TOKENS, 5, 5], [*done.block_ids, *table], 10)
    cache.commit(choice, [*TOKENS, 5, 5], [*done.block_ids, *table], 9)
    assert any(cache.owners.guests.num_at(node) for node in cache.owners.tree.nodes())
    cache.drop(b"tenant")
    serve(cache, PATH, TOKENS)
    assert cache.owners.protection.doomed
    cache.release(first, held.block_ids)
    cache.release(choice, [*done.block_ids, *table])
    assert cache.allocate(15) is not None
    owners = cache.owners
    assert owners.offers is not None
    for table in (owners.protection, owners.guests, owners.pins, owners.offers):
        assert set(table.named()) <= {owners.tree.root}, type(table).__name__
