"""The reason of a cache miss: why the first token that was not cached is missing.

There is no reason "another tenant has it", as only the caller's own path is ever looked at.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple

from cache.tree.namespaces import Segment
from cache.tree.predecessor import Predecessor
from cache.tree.radix import ROOT_HASH, RadixTree, Walk, common_tokens

MissReason = Literal[
    "",
    "opt_out",
    "last_token",
    "below_block",
    "restore_skipped",
    "pin_expired",
    "evicted",
    "version",
    "diverged",
    "cold",
]

_MAX_SIBLINGS = 64
"""The most edges that are compared to name the exact token at which a prompt left the tree; further edges are not
considered."""


class Ghost(NamedTuple):
    """The data that is kept about an evicted block."""

    step: int
    region: bytes
    tenant: str
    lapsed: bool
    """A pin had kept the block until the pin expired."""


class GhostList:
    """A bounded memory of evicted blocks by chained hash; the oldest are dropped first. Every operation is O(1) per
    block."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._ghosts: OrderedDict[int, Ghost] = OrderedDict()

    def add(self, hashes: Iterable[int], ghost: Ghost) -> None:
        for key in hashes:
            self._ghosts.pop(key, None)
            self._ghosts[key] = ghost
        while len(self._ghosts) > self.size:
            self._ghosts.popitem(last=False)

    def find(self, key: int) -> Ghost | None:
        """Returns the data of that block, or None if it is not remembered."""
        return self._ghosts.get(key)

    def forget(self, gone: Callable[[Ghost], bool]) -> None:
        """Forgets ghosts that `gone` selects, so that dropped blocks leave no trace. O(ghosts)."""
        for key in [key for key, ghost in self._ghosts.items() if gone(ghost)]:
            del self._ghosts[key]

    def __len__(self) -> int:
        return len(self._ghosts)


@dataclass(frozen=True, slots=True)
class Miss:
    reason: MissReason = ""
    """The reason. It is "" only for an empty prompt, which misses nothing."""
    diverged_at_token: int = -1
    """The first token that differs from everything in the caller's path, for the reason `diverged`."""
    evicted_age: int = -1
    """Steps since the first missed block was evicted, for the reasons `evicted` and `pin_expired`."""


def behind(reason: MissReason, num_cached: int, num_missed: int, block_size: int) -> Miss:
    """Returns why the rest of a prompt was missed where another tier had more of it than the tree. `reason` is the
    tree's."""
    if num_missed in (1, block_size):
        return Miss("last_token")
    if num_missed < block_size:
        return Miss("below_block" if num_missed else "")
    if reason == "cold":
        return Miss("diverged", diverged_at_token=num_cached)
    return Miss(reason)


def explain(
    tree: RadixTree,
    ghosts: GhostList,
    path: tuple[Segment, ...],
    tokens: Sequence[int],
    walk: Walk,
    step: int,
    predecessor: Predecessor | None = None,
) -> Miss:
    """Returns the first reason that applies to the first missed token. O(siblings compared), at most _MAX_SIBLINGS."""
    matched = walk.num_blocks * tree.block_size
    missed = len(tokens) - matched
    if missed in (1, tree.block_size):
        # One token is always left to compute. If it completes a block, the whole block is computed.
        return Miss("last_token")
    if missed < tree.block_size:
        return Miss("below_block" if missed else "")
    region = next(segment.region for segment in path if segment.end > walk.num_blocks)
    before = walk.node.hashes[walk.num_in_edge - 1] if walk.num_in_edge else ROOT_HASH
    ghost = ghosts.find(tree.hash_of(before, region, tokens, walk.num_blocks))
    if ghost is not None:
        return Miss("pin_expired" if ghost.lapsed else "evicted", evicted_age=step - ghost.step)
    if predecessor is not None and predecessor.knew(path, tokens, walk.num_blocks + 1):
        return Miss("version")
    if not matched:
        return Miss("cold")
    return Miss("diverged", diverged_at_token=_diverged_at(tree, region, path, tokens, walk))


def _diverged_at(tree: RadixTree, region: bytes, path: tuple[Segment, ...], tokens: Sequence[int], walk: Walk) -> int:
    if walk.num_in_edge < len(walk.node.block_ids):
        return walk.num_tokens
    matched = walk.num_blocks * tree.block_size
    if region != path[-1].region or walk.node.region != region:
        # In the public part and at the boundary of a region the siblings are other tenants' too: they are not even
        # counted.
        return matched
    own = (child for (owner, _), child in walk.node.children.items() if owner == region)
    nearest = (common_tokens(child.tokens, tokens, matched, tree.block_size) for child in islice(own, _MAX_SIBLINGS))
    return matched + max(nearest, default=0)
