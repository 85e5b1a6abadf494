"""Floors, quotas, what was used a moment ago, what was idle for long, and pins that end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cache import invariants
from cache.blocks.eviction import RECENT_MS
from cache.blocks.ownership import IDLE_MS
from cache.blocks.usage import COLD, LAST_RESORT, SHARED
from cache.blocks.worth import Range
from cache.prefix_cache import PrefixCache
from cache.tree.handle import Handle
from cache.tree.namespaces import NamespacePath, PathEntry

Serve = Callable[..., Handle]
ANNA, BERT = (PathEntry(b"anna", -1),), (PathEntry(b"bert", -1),)


class Clock:
    now = 0

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cache(clock: Clock) -> PrefixCache:
    """20 blocks of 2 tokens; floors may sum to 12."""
    return PrefixCache(21, 2, pin_limit=16, now_ms=clock)


def prompt(number: int, num_blocks: int) -> list[int]:
    return [number] * 2 * num_blocks


def matched(cache: PrefixCache, path: NamespacePath, tokens: list[int]) -> int:
    return cache.match(path, [*tokens, 99]) // 2


def test_others_are_evicted_down_to_their_floor_and_no_further(cache: PrefixCache, serve: Serve) -> None:
    cache.set_share("anna", floor=5)
    serve(cache, ANNA, prompt(1, 8), tenant="anna")
    serve(cache, BERT, prompt(2, 8), tenant="bert")
    assert cache.available(SHARED) == 15
    assert cache.allocate(16) is None
    assert cache.allocate(15) is not None
    assert (cache.usage("anna").num_blocks, cache.usage("bert").num_blocks) == (5, 0)
    assert matched(cache, ANNA, prompt(1, 8)) == 5, "a path is cut from its end"
    invariants.check(cache, [])


def test_a_floor_gives_way_as_the_last_resort_and_is_counted(cache: PrefixCache, serve: Serve) -> None:
    cache.set_share("anna", floor=5)
    serve(cache, ANNA, prompt(1, 5), tenant="anna")
    serve(cache, BERT, prompt(2, 5), tenant="bert")
    assert cache.allocate(15, reach=LAST_RESORT) is not None
    assert (cache.usage("anna").num_blocks, cache.counts.num_floor_breaches) == (5, 0)
    assert cache.allocate(2, reach=LAST_RESORT) is not None
    assert (cache.usage("anna").num_blocks, cache.counts.num_floor_breaches) == (3, 1)


def test_behind_a_prompt_that_is_public_no_more_only_what_hangs_on_it_loses_a_floor(
    cache: PrefixCache, serve: Serve
) -> None:
    """The prompt's own blocks are within reach, what hangs on it is not: that goes first, and nobody else's floor."""
    public, behind = (PathEntry(b"public", -1),), (PathEntry(b"public", 4), PathEntry(b"anna", -1))
    cache.set_share("anna", floor=6)
    cache.set_share("bert", floor=5)
    serve(cache, BERT, prompt(3, 5), tenant="bert")
    serve(cache, ANNA, prompt(2, 3), tenant="anna")
    serve(cache, public, prompt(1, 2), tenant="operator")
    serve(cache, behind, prompt(1, 5), tenant="anna")
    assert cache.allocate(cache.num_free) is not None
    for _ in range(5):
        assert cache.available(SHARED) > 0
        assert cache.allocate(1) is not None
        invariants.check(cache, [])
    assert matched(cache, BERT, prompt(3, 5)) == 5
    assert matched(cache, ANNA, prompt(2, 3)) == 3
    assert matched(cache, behind, prompt(1, 5)) == 0
    assert cache.available(SHARED) == 0


def test_floors_beyond_the_pools_share_for_them_are_cut(cache: PrefixCache) -> None:
    cache.set_share("anna", floor=10)
    cache.set_share("bert", floor=10)
    assert (cache.usage("anna").floor, cache.usage("bert").floor) == (10, 2)
    cache.set_share("anna", floor=1)
    cache.set_share("bert", floor=10)
    assert cache.usage("bert").floor == 10


def test_above_quota_a_tenant_goes_first_however_warm(cache: PrefixCache, serve: Serve) -> None:
    serve(cache, BERT, prompt(2, 4), tenant="bert", priority=20)
    serve(cache, ANNA, prompt(1, 8), tenant="anna", priority=90)
    cache.set_share("anna", quota=6)
    cache.allocate(cache.num_free + 3)
    assert (cache.usage("anna").num_blocks, cache.usage("bert").num_blocks) == (6, 3)


def test_an_insert_takes_the_tenants_own_coldest_blocks_then_is_cut_short(cache: PrefixCache, serve: Serve) -> None:
    cache.set_share("anna", quota=6)
    serve(cache, BERT, prompt(9, 6), tenant="bert")
    serve(cache, ANNA, prompt(1, 4), tenant="anna")
    serve(cache, ANNA, prompt(2, 4), tenant="anna")
    assert matched(cache, ANNA, prompt(1, 4)) == 2
    assert matched(cache, ANNA, prompt(2, 4)) == 4
    assert cache.counts.num_refused_inserts == 0
    serve(cache, ANNA, prompt(3, 8), tenant="anna")
    assert matched(cache, ANNA, prompt(3, 8)) == 6
    assert cache.counts.num_refused_inserts == 1
    assert matched(cache, BERT, prompt(9, 6)) == 6
    assert cache.counts.num_evicted == {"quota": 8}


def test_what_a_running_sequence_holds_is_not_evicted_for_its_own_quota(cache: PrefixCache, serve: Serve) -> None:
    cache.set_share("anna", quota=4)
    serve(cache, ANNA, prompt(1, 4), tenant="anna")
    longer = [*prompt(1, 4), *prompt(2, 3)]
    serve(cache, ANNA, longer, tenant="anna")
    assert matched(cache, ANNA, longer) == 4


def test_batch_leaves_alone_what_interactive_used_a_moment_ago(cache: PrefixCache, clock: Clock, serve: Serve) -> None:
    serve(cache, ANNA, prompt(1, 6), tenant="anna", priority=50)
    serve(cache, BERT, prompt(2, 6), tenant="bert", priority=20)
    assert cache.available(COLD) == 8 + 6
    assert cache.available(SHARED) == 20
    clock.now = RECENT_MS - 1
    cache.begin_step()
    assert cache.available(COLD) == 14
    clock.now = RECENT_MS
    cache.begin_step()
    assert cache.available(COLD) == 20
    invariants.check(cache, [])


def test_a_hit_begins_the_moment_anew(cache: PrefixCache, clock: Clock, serve: Serve) -> None:
    serve(cache, ANNA, prompt(1, 6), tenant="anna")
    clock.now = RECENT_MS - 1
    serve(cache, ANNA, prompt(1, 6), tenant="anna")
    clock.now = RECENT_MS
    cache.begin_step()
    assert cache.available(COLD) == 14


def test_what_was_idle_for_an_hour_leaves_floors_or_not(cache: PrefixCache, clock: Clock, serve: Serve) -> None:
    cache.set_share("anna", floor=10)
    serve(cache, ANNA, prompt(1, 6), tenant="anna")
    clock.now = 1000
    serve(cache, BERT, prompt(2, 6), tenant="bert")
    clock.now = IDLE_MS - 1
    cache.begin_step()
    assert cache.num_evictable == 12
    clock.now = IDLE_MS
    cache.begin_step()
    assert (cache.usage("anna").num_blocks, cache.usage("bert").num_blocks) == (0, 6)
    assert cache.counts.num_evicted == {"idle": 6}
    assert cache.acquire(ANNA, [*prompt(1, 6), 9]).miss_reason == "evicted"


def pin_for(cache: PrefixCache, start: Callable[..., object], tokens: list[int], ttl: int) -> int:
    handle, result = start(cache, ANNA, tokens, tenant="anna")
    num_pinned = cache.pin_for(handle, len(tokens), ttl)
    cache.release(handle, result.block_ids)
    cache.begin_step()
    invariants.check(cache, [])
    return num_pinned


def test_a_pin_with_a_time_to_live_holds_ends_and_says_so(clock: Clock, start) -> None:
    cache = PrefixCache(9, 2, pin_limit=16, now_ms=clock)
    assert pin_for(cache, start, prompt(1, 2), 1000) == 2
    clock.now = 999
    cache.begin_step()
    cache.free(cache.allocate(6) or [])
    assert cache.allocate(7, reach=LAST_RESORT) is None
    clock.now = 1000
    cache.begin_step()
    assert cache.num_pinned == 0
    cache.free(cache.allocate(8) or [])
    handle = cache.acquire(ANNA, [*prompt(1, 2), 9])
    assert handle.miss_reason == "pin_expired"
    assert handle.evicted_age >= 0


def test_a_pin_that_was_lifted_and_set_again_in_the_same_millisecond(cache: PrefixCache, clock: Clock, start) -> None:
    """The lifted pin is in the queue of ends still, with the same node and the same end."""
    assert pin_for(cache, start, prompt(1, 2), 1000) == 2
    assert cache.unpin(b"anna") == 1
    assert cache.num_pinned == 0
    assert pin_for(cache, start, prompt(1, 2), 1000) == 2
    clock.now = 1000
    cache.begin_step()
    assert cache.num_pinned == 0


def test_a_hit_refreshes_the_time_to_live(cache: PrefixCache, clock: Clock, start, serve: Serve) -> None:
    assert pin_for(cache, start, prompt(1, 2), 1000) == 2
    clock.now = 900
    serve(cache, ANNA, [*prompt(1, 2), 7], tenant="anna")
    clock.now = 1899
    cache.begin_step()
    assert cache.num_pinned == 2
    clock.now = 1900
    cache.begin_step()
    assert cache.num_pinned == 0


def test_the_budget_of_a_tenant_pins_the_beginning_of_a_longer_prompt(cache: PrefixCache, clock: Clock, start) -> None:
    assert cache.retention.tenant_limit == 2
    assert pin_for(cache, start, prompt(1, 5), 1000) == 2
    assert pin_for(cache, start, prompt(2, 5), 1000) == 0
    assert cache.num_pinned == 2
    clock.now = 1000
    cache.begin_step()
    assert pin_for(cache, start, prompt(2, 5), 1000) == 2


def test_pins_that_end_leave_half_of_the_budget_to_public_prompts(clock: Clock, start) -> None:
    cache = PrefixCache(41, 2, pin_limit=8, now_ms=clock)
    operator = (PathEntry(b"public", -1),)
    for number in range(4):
        path = (PathEntry(b"%d" % number, -1),)
        handle, _ = start(cache, path, prompt(number, 3), tenant=str(number))
        assert cache.pin_for(handle, 6, 1000) == 1
    handle, _ = start(cache, (PathEntry(b"4", -1),), prompt(4, 3), tenant="4")
    assert cache.pin_for(handle, 6, 1000) == 1 - 1
    handle, _ = start(cache, operator, prompt(5, 4), tenant="operator")
    assert cache.pin(handle) == 4


def test_ranges_of_a_prompt_have_a_worth_of_their_own(cache: PrefixCache, start) -> None:
    tokens = [1, 1, 2, 2, 3, 3, 4, 4]
    ranges = (Range(0, 2, 80), Range(2, 4, 30), Range(4, 5, 99))
    start(cache, ANNA, tokens, tenant="anna", ranges=ranges, prompt_len=6, output_priority=10)
    worth = [cache.owners.protection.priority(n) for n in cache.owners.tree.nodes()][1:]
    # A part is worth at least what comes behind it: 50 of the last prompt block lifts the 30 before it.
    assert worth == [80, 50, 50, 10]


def test_a_purge_forgets_every_region_of_a_tenant_and_lets_nothing_back_in(
    cache: PrefixCache, start, serve: Serve
) -> None:
    salted = (PathEntry(b"anna salted", -1),)
    serve(cache, ANNA, prompt(1, 3), tenant="anna")
    serve(cache, salted, prompt(2, 3), tenant="anna")
    serve(cache, BERT, prompt(1, 3), tenant="bert")
    fresh = cache.acquire(ANNA, prompt(7, 2), tenant="anna")
    table = cache.allocate(2) or []
    cache.purge("anna")
    assert (cache.usage("anna").num_blocks, matched(cache, BERT, prompt(1, 3))) == (0, 3)
    assert cache.commit(fresh, prompt(7, 2), table, 4).num_inserted_blocks == 0
    cache.release(fresh, table)
    assert cache.acquire(ANNA, prompt(1, 3)).miss_reason == "cold"
    serve(cache, ANNA, prompt(1, 3), tenant="anna")
    assert matched(cache, ANNA, prompt(1, 3)) == 3


def test_evictions_are_counted_for_who_lost_and_for_whom(cache: PrefixCache, serve: Serve) -> None:
    serve(cache, ANNA, prompt(1, 10), tenant="anna")
    cache.allocate(14, needed_by="bert")
    assert cache.usage("anna").num_evicted == cache.usage("bert").num_evicted_for == 4
    assert cache.usage("anna").num_evicted_for == 0


def test_what_a_batch_wrote_meanwhile_is_worth_more_once_a_chat_commits_it(cache: PrefixCache, serve: Serve) -> None:
    tokens = prompt(1, 3)
    chat, table = cache.acquire(ANNA, tokens, tenant="anna"), cache.allocate(3) or []
    serve(cache, ANNA, tokens, tenant="anna", priority=20)
    done = cache.commit(chat, tokens, table, 6, priority=50)
    cache.release(chat, done.block_ids)
    assert [cache.owners.protection.priority(n) for n in cache.owners.tree.nodes()][1:] == [50]
    assert cache.available(COLD) == 17
    invariants.check(cache, [])
