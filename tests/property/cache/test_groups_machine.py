"""The groups that routers are told of, against hashes of every prompt that the tree can answer; the cache's own random
walk, with groups of two blocks."""

from __future__ import annotations

from itertools import groupby
from unittest import mock

from cache_machine import SIZE, CacheMachine, Prefix, at_length
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

import cache.tree.groups
import cache.tree.hashing

GROUP = 2 * SIZE
SECRET, ROOT = b"s" * 32, "root"


def hashes(prefix: Prefix, *, closed: bool = False) -> set[bytes]:
    """Of a prompt that ends here; `closed`: another region goes on behind it."""
    ends, position = [], 0
    for region, run in groupby(region for region, _ in prefix):
        position += len(list(run))
        ends.append((region, position))
    path = [*ends, (b"behind", -1)] if closed else [*ends[:-1], (ends[-1][0], -1)]
    tokens = [token for _, token in prefix]
    found = cache.tree.hashing.group_hashes(SECRET, ROOT.encode(), path, tokens, block_size=SIZE)
    return {group for group, _ in found}


class GroupsMachine(CacheMachine):
    @initialize(num_blocks=st.integers(9, 16), pin_limit=st.sampled_from([0, 3, 16, 100]))
    def start(self, num_blocks: int, pin_limit: int) -> None:
        super().start(num_blocks, pin_limit)
        self.patches = [
            mock.patch.object(module, "GROUP_TOKENS", GROUP) for module in (cache.tree.groups, cache.tree.hashing)
        ]
        for patch in self.patches:
            patch.start()
        self.watch = self.cache.watch_groups(SECRET, ROOT)
        self.heard: set[bytes] = set()

    @invariant()
    def events_tell_exactly_what_is_there(self) -> None:
        if not hasattr(self, "watch"):
            return
        inserted, evicted = self.watch.take()
        assert self.heard.isdisjoint(inserted)
        assert self.heard.issuperset(evicted)
        self.heard = (self.heard | set(inserted)) - set(evicted)
        assert self.heard == set(self.watch.present(10**6))
        prefixes = list(self.in_the_tree())
        found = set().union(*(hashes(prefix) for prefix in prefixes))
        closings = set().union(*(hashes(prefix, closed=True) for prefix in prefixes))
        assert found <= self.heard <= found | closings

    @invariant()
    def a_watch_that_begins_late_sees_the_same(self) -> None:
        if hasattr(self, "watch"):
            tree = self.cache.owners.tree
            late = cache.tree.groups.GroupWatch(tree, SECRET, ROOT.encode())
            tree.watch = self.watch
            assert set(late.present(10**6)) <= set(self.watch.present(10**6))

    def teardown(self) -> None:
        super().teardown()
        for patch in getattr(self, "patches", ()):
            patch.stop()


GroupsMachine.TestCase.settings = CacheMachine.TestCase.settings
TestGroups = GroupsMachine.TestCase
TestGroupsAtLength = at_length(GroupsMachine)
