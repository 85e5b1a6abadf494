"""The whole groups of 64 tokens that the tree holds, by the hashes that routers know, and the changes since they were
last taken.

A group is present once its last block is in the tree, and gone with the first of its blocks that leaves: eviction cuts
tails, so that is its last block too. Groups restart where a region begins (cache/tree/hashing.py), so a region that ends
inside a group has a shorter last one; it is known from the first branch after it on. The module knows no worker and no
wire format.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from cache.tree.hashing import GROUP_TOKENS, group_hash, group_hasher, root_hash
from cache.tree.radix import Node, RadixTree


@dataclass(slots=True)
class _Edge:
    first: int
    """The number of blocks of its region before the edge."""
    before: bytes
    """The hash of the last group that ended before the edge."""
    hashes: list[bytes] = field(default_factory=list)
    """The hashes of the groups that end in the edge."""
    closing: bytes = b""
    """The hash of the shorter group with which the region ends here, if another region begins after it."""

    @property
    def last(self) -> bytes:
        return self.hashes[-1] if self.hashes else self.before


class GroupWatch:
    """Follows every change of one tree. Amortised O(new tokens). Nothing that the tree has is stored twice."""

    def __init__(self, tree: RadixTree, secret: bytes, root: bytes) -> None:
        """Watches the tree from now on. Raises ValueError if a group is no whole number of blocks."""
        if GROUP_TOKENS % tree.block_size:
            raise ValueError(f"blocks of {tree.block_size} tokens do not fill groups")
        self._tree = tree
        self._hasher = group_hasher(secret)
        self._size = GROUP_TOKENS // tree.block_size
        self._root = root_hash(secret, root)
        self._edges: dict[Node, _Edge] = {}
        self._inserted: dict[bytes, None] = {}
        self._evicted: dict[bytes, None] = {}
        for node in tree.nodes():
            if node.parent is not None:
                self.grown(node)
        self.take()
        tree.watch = self

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """Returns (inserted, evicted) since the last call, each in order. A group that came and went in between is in
        neither."""
        changes = list(self._inserted), list(self._evicted)
        if self._inserted:
            self._inserted = {}
        if self._evicted:
            self._evicted = {}
        return changes

    def present(self, limit: int) -> list[bytes]:
        """Returns all groups that are present, each after those before it in its prompt; at most `limit`. O(tree)."""
        found: list[bytes] = []
        for node in self._tree.nodes():
            if node.parent is None:
                continue
            edge = self._edges[node]
            found += edge.hashes
            if edge.closing:
                found.append(edge.closing)
            if len(found) >= limit:
                return found[:limit]
        return found

    # The tree calls these functions at its changes.

    def grown(self, node: Node) -> None:
        edge = self._edges.get(node)
        if edge is None:
            edge = self._edges[node] = self._entered(node)
        elif edge.closing:
            self._left(edge.closing)
            edge.closing = b""
        while len(edge.hashes) < self._num_groups(edge, node):
            end = (edge.first // self._size + len(edge.hashes) + 1) * self._size - edge.first
            edge.hashes.append(self._hash(node, edge, end, self._size))
            self._came(edge.hashes[-1])

    def split(self, upper: Node, tail: Node) -> None:
        edge = self._edges[tail]
        top = self._edges[upper] = _Edge(edge.first, edge.before)
        num = self._num_groups(top, upper)
        top.hashes, edge.hashes = edge.hashes[:num], edge.hashes[num:]
        edge.first, edge.before = edge.first + len(upper.block_ids), top.last

    def cut(self, node: Node) -> None:
        edge = self._edges[node]
        kept = self._num_groups(edge, node)
        while len(edge.hashes) > kept:
            self._left(edge.hashes.pop())
        if edge.closing:
            self._left(edge.closing)
            edge.closing = b""

    def unlinked(self, top: Node) -> None:
        for node in self._tree.nodes(top):
            edge = self._edges.pop(node)
            for gone in edge.hashes:
                self._left(gone)
            if edge.closing:
                self._left(edge.closing)

    def named(self) -> Iterable[Node]:
        return self._edges.keys()

    # Internal functions.

    def _num_groups(self, edge: _Edge, node: Node) -> int:
        return (edge.first + len(node.block_ids)) // self._size - edge.first // self._size

    def _entered(self, node: Node) -> _Edge:
        parent = node.parent
        assert parent is not None
        if parent.parent is None:
            return _Edge(0, self._root)
        above = self._edges[parent]
        if parent.region == node.region:
            return _Edge(above.first + len(parent.block_ids), above.last)
        return _Edge(0, self._closed(parent, above))

    def _closed(self, node: Node, edge: _Edge) -> bytes:
        num_rest = (edge.first + len(node.block_ids)) % self._size
        if not num_rest:
            return edge.last
        if not edge.closing:
            edge.closing = self._hash(node, edge, len(node.block_ids), num_rest)
            self._came(edge.closing)
        return edge.closing

    def _hash(self, node: Node, edge: _Edge, end: int, num_blocks: int) -> bytes:
        tokens = self._tokens(node, end, num_blocks)
        return group_hash(self._hasher, edge.last, node.region, tokens)

    def _tokens(self, node: Node, end: int, num_blocks: int) -> array[int]:
        """Returns the tokens of the `num_blocks` blocks before block `end` of the edge. The first of them may lie in
        edges above."""
        size, start = self._tree.block_size, end - num_blocks
        own = node.tokens[max(0, start) * size : end * size]
        if start >= 0:
            return own
        assert node.parent is not None
        return self._tokens(node.parent, len(node.parent.block_ids), -start) + own

    def _came(self, group: bytes) -> None:
        if group in self._evicted:
            del self._evicted[group]
        else:
            self._inserted[group] = None

    def _left(self, group: bytes) -> None:
        if group in self._inserted:
            del self._inserted[group]
        else:
            self._evicted[group] = None
