from __future__ import annotations

from collections.abc import Callable

import pytest

from cache.prefix_cache import PrefixCache
from cache.tree.handle import Handle
from cache.tree.misses import Ghost, GhostList
from cache.tree.namespaces import PathEntry

Serve = Callable[..., Handle]
PATH = (PathEntry(b"tenant", -1),)
BEHIND = (PathEntry(b"public", 4), PathEntry(b"tenant", -1))


def reason(cache: PrefixCache, tokens: list[int], **how: object) -> tuple[str, int, int]:
    handle = cache.acquire(how.pop("path", PATH), tokens, **how)
    cache.release(handle, handle.block_ids)
    return handle.miss_reason, handle.diverged_at_token, handle.evicted_age


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8], ("last_token", -1, -1)),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], ("last_token", -1, -1)),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], ("below_block", -1, -1)),
        ([1, 2, 3], ("below_block", -1, -1)),
        ([1], ("last_token", -1, -1)),
        ([], ("", -1, -1)),
        ([1, 2, 3, 4, 5, 6, 0, 0, 9], ("diverged", 6, -1)),
        ([1, 2, 3, 4, 0, 0, 0, 0, 0], ("diverged", 4, -1)),
        ([1, 2, 3, 0, 5, 6, 7, 8, 9], ("cold", -1, -1)),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9, 9], ("diverged", 8, -1)),
    ],
)
def test_the_reason_is_that_of_the_first_missed_token(
    tokens: list[int], expected: tuple[str, int, int], serve: Serve
) -> None:
    cache = PrefixCache(16, 4)
    serve(cache, PATH, [1, 2, 3, 4, 5, 6, 7, 8])
    assert reason(cache, tokens) == expected


def test_the_diverging_token_is_exact_where_edges_meet(serve: Serve) -> None:
    cache = PrefixCache(16, 4)
    serve(cache, PATH, [1, 2, 3, 4, 5, 6, 7, 8])
    serve(cache, PATH, [1, 2, 3, 4, 5, 0, 0, 0])
    assert reason(cache, [1, 2, 3, 4, 5, 6, 7, 9, 9]) == ("diverged", 7, -1)


def test_opting_out_is_the_reason_whatever_the_tree_holds(serve: Serve) -> None:
    cache = PrefixCache(16, 4)
    serve(cache, PATH, [1, 2, 3, 4])
    assert reason(cache, [1, 2, 3, 4, 5], read=False) == ("opt_out", -1, -1)


def test_an_evicted_block_is_remembered_with_its_age(serve: Serve) -> None:
    cache = PrefixCache(6, 2)
    serve(cache, PATH, [1, 2, 3, 4])
    cache.free(cache.allocate(4) or [])
    for _ in range(3):
        cache.begin_step()
    assert reason(cache, [1, 2, 3, 4, 5]) == ("evicted", -1, 3)
    assert reason(cache, [1, 2, 9, 9, 9]) == ("diverged", 2, -1)


def test_the_same_block_behind_another_prefix_is_not_called_evicted(serve: Serve) -> None:
    cache = PrefixCache(6, 2)
    serve(cache, PATH, [1, 2, 3, 4])
    cache.free(cache.allocate(5) or [])
    assert reason(cache, [3, 4, 5]) == ("cold", -1, -1)


def test_a_cache_without_ghosts_says_cold(serve: Serve) -> None:
    cache = PrefixCache(6, 2, ghost_size=0)
    serve(cache, PATH, [1, 2, 3, 4])
    cache.allocate(5)
    assert reason(cache, [1, 2, 3, 4, 5]) == ("cold", -1, -1)


def test_at_a_wall_the_siblings_are_not_looked_at(serve: Serve) -> None:
    """Behind the public part other tenants branch off too: only where the tenant's own part begins is said."""
    cache = PrefixCache(16, 4)
    serve(cache, (PathEntry(b"public", -1),), [1, 2, 3, 4])
    serve(cache, BEHIND, [1, 2, 3, 4, 5, 6, 7, 8])
    assert reason(cache, [1, 2, 3, 4, 5, 6, 0, 0, 0], path=BEHIND) == ("diverged", 4, -1)


def ghost(step: int, region: bytes, tenant: str = "") -> Ghost:
    return Ghost(step, region, tenant, lapsed=False)


def test_the_ghost_list_is_bounded_and_forgets_the_oldest() -> None:
    ghosts = GhostList(3)
    ghosts.add([1, 2, 3], ghost(1, b"a"))
    ghosts.add([1, 4], ghost(2, b"b"))
    assert len(ghosts) == 3
    found = [ghosts.find(key) for key in (1, 2, 3, 4)]
    assert [one and one.step for one in found] == [2, None, 1, 2]


def test_the_ghost_list_forgets_what_it_is_told_to() -> None:
    ghosts = GhostList(3)
    ghosts.add([1], ghost(1, b"a"))
    ghosts.add([2], ghost(1, b"b"))
    ghosts.forget(lambda one: one.region == b"a")
    assert ghosts.find(1) is None
    assert ghosts.find(2) == ghost(1, b"b")
