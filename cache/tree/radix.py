"""The radix tree over token ids: find, add, extend, split, unlink. The module has the structure only.

An edge is a run of whole blocks: its tokens, the ids of the blocks that hold their KV, and one chained hash per block.
The module knows nothing of free blocks, protection or age: what is known about a node besides its structure stands in
side tables (cache/blocks/ownership.py). Tokens and ids are `array`s on the CPU, and never a view of another node's storage, so a split really halves
the memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from cache.tree.namespaces import Segment

ChildKey = tuple[bytes, bytes]
ROOT_HASH = 0


class Node:
    """One edge and the point at which it ends. A handle on a node stands for that point."""

    __slots__ = ("block_ids", "children", "hashes", "id", "parent", "region", "tenant", "tokens")

    def __init__(self, node_id: int, parent: Node | None, region: bytes, tenant: str = "") -> None:
        self.id = node_id
        self.parent = parent
        self.region = region
        self.tenant = tenant
        """The tenant that inserted the blocks of the edge, and for which they count."""
        self.tokens: array[int] = array("i")
        self.block_ids: array[int] = array("i")
        self.hashes: array[int] = array("q")
        self.children: dict[ChildKey, Node] = {}

    @property
    def end_hash(self) -> int:
        return self.hashes[-1] if self.hashes else ROOT_HASH

    def __repr__(self) -> str:
        region = self.region.hex()[:8] or "-"
        return f"Node({self.id}, region={region}, blocks={list(self.block_ids)})"


class Walk(NamedTuple):
    """The end of a walk: `num_in_edge` blocks into `node`'s edge, `num_blocks` from the root, `num_tokens` equal
    tokens."""

    node: Node
    num_in_edge: int
    num_blocks: int
    num_tokens: int


def token_slice(tokens: Sequence[int], start: int, stop: int) -> array[int]:
    """Returns a piece of a token sequence as array('i'). It is copied by memcpy from an array('i'), and item by item
    from a list."""
    piece = tokens[start:stop]
    if isinstance(piece, array) and piece.typecode == "i":
        return piece
    return array("i", piece)


def common_tokens(edge: array[int], tokens: Sequence[int], start: int, length: int) -> int:
    """Returns how many tokens of edge[:length] equal tokens[start:]. The result is exact: no hash decides.

    It compares slices that grow fourfold, so that the C comparison does nearly all of the work on a long equal edge and
    little is copied on one that differs early. Then it halves the slice that differs.
    """
    low, high, size = 0, 0, 64
    while edge[low:high] == token_slice(tokens, start + low, start + high):
        if high == length:
            return length
        low, high, size = high, min(high + size, length), size * 4
    while high - low > 1:
        middle = (low + high) // 2
        if edge[low:middle] == token_slice(tokens, start + low, start + middle):
            low = middle
        else:
            high = middle
    return low


def chain_hash(previous: int, region: bytes, block: bytes) -> int:
    """Returns the identity of a block and all before it. A hit never depends on it: a collision costs a wrong miss
    reason."""
    return hash((previous, region, block))


class Watch(Protocol):
    """An observer that is called directly after every change of structure."""

    def grown(self, node: Node) -> None: ...

    def split(self, upper: Node, tail: Node) -> None: ...

    def cut(self, node: Node) -> None: ...

    def unlinked(self, top: Node) -> None: ...

    def named(self) -> Iterable[Node]: ...


class RadixTree:
    def __init__(self, block_size: int) -> None:
        if block_size < 1:
            raise ValueError("block_size must be at least 1")
        self.watch: Watch | None = None
        self.block_size = block_size
        self.root = Node(0, None, b"")
        self._next_id = 1

    def child(self, node: Node, region: bytes, tokens: Sequence[int], block: int) -> Node | None:
        """Returns the child whose edge starts with that block of the tokens. Another region's branch is not looked at.
        O(1)."""
        return node.children.get((region, self._block_bytes(tokens, block)))

    def walk(self, path: tuple[Segment, ...], tokens: Sequence[int], limit: int, node: Node, depth: int) -> Walk:
        """Returns the longest run of blocks up to `limit` that the tree holds, from the end of `node`, which is `depth`
        blocks deep. O(matched tokens); it changes nothing."""
        size = self.block_size
        for segment in path:
            stop = min(segment.end, limit)
            while depth < stop:
                child = self.child(node, segment.region, tokens, depth)
                if child is None:
                    return Walk(node, len(node.block_ids), depth, depth * size)
                length = min(len(child.block_ids), stop - depth) * size
                equal = common_tokens(child.tokens, tokens, depth * size, length)
                depth, num_tokens = depth + equal // size, depth * size + equal
                if equal // size < len(child.block_ids):
                    # No other region begins inside an edge: that would have split it.
                    return Walk(child, equal // size, depth, num_tokens)
                node = child
        return Walk(node, len(node.block_ids), depth, depth * size)

    def add_child(
        self, parent: Node, region: bytes, tokens: Sequence[int], ids: Sequence[int], tenant: str = ""
    ) -> Node:
        """Adds a new leaf. O(new blocks)."""
        node = Node(self._take_id(), parent, region, tenant)
        parent.children[(region, token_slice(tokens, 0, self.block_size).tobytes())] = node
        self.extend(node, tokens, ids, parent.end_hash)
        return node

    def extend(self, node: Node, tokens: Sequence[int], ids: Sequence[int], before: int) -> None:
        """Appends blocks to an edge. `before` is the hash of everything before them. O(new blocks)."""
        data = token_slice(tokens, 0, len(ids) * self.block_size)
        raw, width = data.tobytes(), self.block_size * data.itemsize
        for start in range(0, len(raw), width):
            before = chain_hash(before, node.region, raw[start : start + width])
            node.hashes.append(before)
        node.tokens.extend(tokens)
        node.block_ids.extend(ids)
        if self.watch is not None:
            self.watch.grown(node)

    def split(self, node: Node, num_blocks: int) -> Node:
        """Makes a new upper node that takes the first blocks of the edge. The old object keeps the tail, so that
        handles on its end, its pin and its heap entry stay valid. The caller updates the side tables. O(edge)."""
        size, parent = self.block_size, node.parent
        assert parent is not None
        assert 0 < num_blocks < len(node.block_ids)
        upper = Node(self._take_id(), parent, node.region, node.tenant)
        parent.children[self._key(node)] = upper
        upper.tokens, node.tokens = (node.tokens[: num_blocks * size], node.tokens[num_blocks * size :])
        upper.block_ids, node.block_ids = node.block_ids[:num_blocks], node.block_ids[num_blocks:]
        upper.hashes, node.hashes = node.hashes[:num_blocks], node.hashes[num_blocks:]
        upper.children[self._key(node)] = node
        node.parent = upper
        if self.watch is not None:
            self.watch.split(upper, node)
        return upper

    def truncate(self, node: Node, num_blocks: int) -> None:
        """Keeps the first blocks of an edge. O(blocks cut)."""
        del node.tokens[num_blocks * self.block_size :]
        del node.block_ids[num_blocks:]
        del node.hashes[num_blocks:]
        if self.watch is not None:
            self.watch.cut(node)

    def unlink(self, node: Node) -> Node:
        """Removes a node from its parent's children, with everything below it. Returns the parent. O(1)."""
        assert node.parent is not None
        del node.parent.children[self._key(node)]
        if self.watch is not None:
            self.watch.unlinked(node)
        return node.parent

    def nodes(self, start: Node | None = None) -> Iterator[Node]:
        """Yields a node (the root by default) and everything below it, parents first. It is iterative, as the depth is
        unbounded."""
        stack = [start or self.root]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def ids_between(self, above: Node, node: Node) -> list[int]:
        """Returns the block ids from the end of one node to the end of another below it. O(blocks)."""
        edges = []
        while node is not above:
            edges.append(node.block_ids)
            assert node.parent is not None
            node = node.parent
        return [block for edge in reversed(edges) for block in edge]

    def hash_at(self, walk: Walk) -> int:
        """Returns the chained hash of everything up to the end of the walk. O(1)."""
        if walk.num_in_edge:
            return walk.node.hashes[walk.num_in_edge - 1]
        return walk.node.parent.end_hash if walk.node.parent else ROOT_HASH

    def hash_of(self, before: int, region: bytes, tokens: Sequence[int], block: int) -> int:
        """Returns the chained hash of that block of the tokens, which follows everything that hashed to `before`."""
        return chain_hash(before, region, self._block_bytes(tokens, block))

    def _key(self, node: Node) -> ChildKey:
        return (node.region, node.tokens[: self.block_size].tobytes())

    def _block_bytes(self, tokens: Sequence[int], block: int) -> bytes:
        size = self.block_size
        return token_slice(tokens, block * size, (block + 1) * size).tobytes()

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1
