"""What the prefix cache hands to its caller: handles, probes, results of a commit. Values; they do nothing themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from cache.tree.misses import MissReason
from cache.tree.namespaces import Segment
from cache.tree.radix import Node


@dataclass(slots=True, eq=False)
class Handle:
    """What one sequence holds of the tree, from `acquire` (or `fork`) to `release`.

    All fields but `node` and `num_tree_blocks` describe the acquisition and never change: they are the request's cache
    report. `num_tree_blocks` says how much of the block table the tree owns now; `commit` moves it.
    """

    block_ids: list[int]
    num_tokens: int
    public_tokens: int
    miss_reason: MissReason
    diverged_at_token: int
    """First token that differs from everything the path holds, if the reason is `diverged`; else -1."""
    evicted_age: int
    """Steps since the first missed block was evicted, if the reason is `evicted` or `pin_expired`; else -1."""
    number: int
    """Handles made before a purge of their tenant write nothing after it."""
    tenant: str
    path: tuple[Segment, ...] = field(repr=False)
    node: Node = field(repr=False)
    num_tree_blocks: int
    released: bool = False


BlockKey = tuple[bytes, int]
"""(region, chained hash): names a block and all before it. A hint for order; equality of tokens is checked elsewhere."""


class Probe(NamedTuple):
    num_tokens: int
    """Cached: what `acquire` would give now."""
    next_key: BlockKey | None
    """Of the first block that is not cached; None if what is left is shorter than a block."""


class CommitResult(NamedTuple):
    block_ids: list[int]
    """The block table from now on; the very list that was passed in unless a duplicate was replaced."""
    num_inserted_blocks: int
    """New in the tree: table positions num_tree_blocks - num_inserted_blocks up to num_tree_blocks."""
    num_inserted_tokens: int
    num_tree_blocks: int
    freed_duplicates: tuple[int, ...] = ()
    """Private blocks that the table no longer names, because the tree had their tokens. Released already, unless the
    commit was `deferred`: then the caller passes them to `free` once the device is past them."""
