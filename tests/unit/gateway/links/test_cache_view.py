"""What a gateway knows of a worker's cache."""

from __future__ import annotations

from gateway.routing.links.cache_view import CacheView
from workers.protocol.messages import CacheEvent

GROUPS = [(bytes([n]) * 16, 64 * (n + 1)) for n in range(10)]
HASHES = tuple(group for group, _ in GROUPS)


def view(*hashes: bytes, **more: int) -> CacheView:
    made = CacheView(**more)
    assert made.apply(CacheEvent(7, reset=True, inserted=hashes))
    return made


def test_as_many_groups_as_are_there_from_the_first_on() -> None:
    for num in range(len(HASHES) + 1):
        assert view(*HASHES[:num]).num_tokens(GROUPS, 0.0) == 64 * num


def test_events_come_in_and_go_out() -> None:
    cached = view(*HASHES[:4])
    assert cached.apply(CacheEvent(8, inserted=HASHES[4:6]))
    assert cached.apply(CacheEvent(9, evicted=HASHES[3:6]))
    assert cached.num_tokens(GROUPS, 0.0) == 192
    assert len(cached) == 3


def test_a_gap_forgets_everything_until_a_snapshot_comes() -> None:
    cached = view(*HASHES)
    assert not cached.apply(CacheEvent(9, inserted=HASHES[:1]))
    assert cached.num_tokens(GROUPS, 0.0) == 0
    assert cached.apply(CacheEvent(10, inserted=HASHES[:1]))  # asked for already
    assert cached.num_tokens(GROUPS, 0.0) == 0
    assert cached.apply(CacheEvent(11, reset=True, inserted=HASHES[:2]))
    assert cached.apply(CacheEvent(12, inserted=HASHES[2:3]))
    assert cached.num_tokens(GROUPS, 0.0) == 192


def test_before_the_first_snapshot_nothing_is_known() -> None:
    cached = CacheView()
    assert cached.apply(CacheEvent(3, inserted=HASHES))
    assert cached.num_tokens(GROUPS, 0.0) == 0


def test_memory_is_bounded() -> None:
    cached = view(*HASHES, max_groups=3)
    assert cached.apply(CacheEvent(8, inserted=HASHES[3:]))
    assert (len(cached), cached.num_tokens(GROUPS, 0.0)) == (3, 192)


def test_what_is_assumed_ends_with_its_time_and_what_is_known_stays() -> None:
    cached = view()
    cached.assume(GROUPS[:5], until=10.0, now=1.0)
    assert cached.num_tokens(GROUPS, 9.9) == 320
    assert cached.apply(CacheEvent(8, inserted=HASHES[:2]))
    assert cached.num_tokens(GROUPS, 10.0) == 128


def test_what_a_request_in_flight_holds_stays_assumed_whatever_is_evicted() -> None:
    cached = view(*HASHES[:2])
    cached.assume(GROUPS[:3], until=10.0, now=1.0)
    assert cached.apply(CacheEvent(8, evicted=HASHES[:2]))
    assert cached.num_tokens(GROUPS, 2.0) == 192
    assert cached.num_tokens(GROUPS, 10.0) == 0
