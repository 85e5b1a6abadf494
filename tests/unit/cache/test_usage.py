from __future__ import annotations

from collections.abc import Callable

from cache import invariants
from cache.blocks.usage import UNLIMITED, TenantBlocks, Usage
from cache.prefix_cache import PrefixCache
from cache.tree.handle import CommitResult, Handle
from cache.tree.namespaces import PathEntry

Start = Callable[..., tuple[Handle, CommitResult]]
Serve = Callable[..., Handle]
ANNA = (PathEntry(b"public", 2), PathEntry(b"anna", -1))
OPERATOR = (PathEntry(b"public", -1),)


class Clock:
    now = 0

    def __call__(self) -> int:
        return self.now


def test_block_milliseconds_are_integrated_at_each_change() -> None:
    clock = Clock()
    usage = Usage(clock)
    usage.change("anna", held=3)
    clock.now = 10
    usage.change("anna", held=-3, retained=3)
    clock.now = 15
    assert usage.of("anna") == TenantBlocks(0, 3, 30, 15, 15)
    assert usage.of("anna") == TenantBlocks(0, 3, 30, 15, 15)
    assert usage.of("nobody") == TenantBlocks(since_ms=15)
    assert usage.tenants() == ("anna",)


def test_a_look_takes_who_has_blocks_or_changed_and_forgets_who_has_nothing_left() -> None:
    clock = Clock()
    usage = Usage(clock)
    usage.set_share("quota", 0, 5)
    for number in range(1000):
        usage.change(f"t{number}", retained=2)
    clock.now = 10
    for number in range(1, 1000):
        usage.change(f"t{number}", retained=-2)
    first = usage.look()
    assert len(first) == 1001
    assert first["t7"] == TenantBlocks(0, 0, 0, 20, 10) and first["t7"].is_over
    assert not (first["t0"].is_over or first["quota"].is_over)
    assert usage.tenants() == ("quota", "t0")
    clock.now = 15
    usage.change("t7", held=1)
    assert usage.look() == {"t0": TenantBlocks(0, 2, 0, 30, 15), "t7": TenantBlocks(1, 0, 0, 0, 15)}
    usage.set_share("quota", 0, UNLIMITED)
    assert usage.look()["quota"].is_over
    assert usage.tenants() == ("t0", "t7")


def test_what_is_read_does_not_change_with_the_tree() -> None:
    usage = Usage(lambda: 0)
    usage.change("anna", held=1)
    before = usage.of("anna")
    usage.change("anna", held=1)
    assert before.num_held == 1


def test_a_block_counts_for_its_inserter_once_and_as_held_while_anyone_stands_on_it(start: Start, serve: Serve) -> None:
    clock = Clock()
    cache = PrefixCache(16, 2, now_ms=clock)
    serve(cache, OPERATOR, [1, 2], tenant="operator")
    first, result = start(cache, ANNA, [1, 2, 3, 4, 5, 6], tenant="anna")
    second, again = start(cache, ANNA, [1, 2, 3, 4, 5, 6], tenant="anna")
    assert cache.usage("anna").num_held == 2
    assert cache.usage("operator").num_held == 1
    clock.now = 100
    cache.release(first, result.block_ids)
    assert cache.usage("anna").num_held == 2
    cache.release(second, again.block_ids)
    clock.now = 150
    assert cache.usage("anna") == TenantBlocks(0, 2, 200, 100, 150, num_recent=2)
    assert cache.tenants() == ("operator", "anna")
    invariants.check(cache, [])


def test_evicted_and_dropped_blocks_no_longer_count(start: Start, serve: Serve) -> None:
    cache = PrefixCache(9, 2)
    path = (PathEntry(b"anna", -1),)
    serve(cache, path, [1, 2, 3, 4, 5, 6, 7, 8], tenant="anna")
    cache.free(cache.allocate(5) or [])
    assert cache.usage("anna").num_retained == 3
    handle, result = start(cache, path, [1, 2, 3, 4], tenant="anna")
    cache.drop(b"anna")
    assert (cache.usage("anna").num_held, cache.usage("anna").num_retained) == (2, 0)
    cache.release(handle, result.block_ids)
    assert cache.usage("anna").num_held == 0
    invariants.check(cache, [])


def test_blocks_under_pins_are_integrated_apart(start: Start) -> None:
    clock = Clock()
    cache = PrefixCache(16, 2, pin_limit=8, now_ms=clock)
    handle, result = start(cache, OPERATOR, [1, 2, 3, 4], tenant="operator")
    assert cache.pin(handle) == 2
    cache.release(handle, result.block_ids)
    clock.now = 100
    blocks = cache.usage("operator")
    assert (blocks.num_pinned, blocks.pinned_block_ms, blocks.held_block_ms) == (2, 200, 200)
    cache.unpin(b"public")
    clock.now = 150
    blocks = cache.usage("operator")
    assert (blocks.num_pinned, blocks.pinned_block_ms, blocks.retained_block_ms) == (0, 200, 100)
    invariants.check(cache)
