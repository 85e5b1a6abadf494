"""The blocks that this worker's cache held under an earlier root, as names only, so that a first miss after new weights
has the reason `version`.

A name is a chained hash of (region, tokens) up to the end of a block. Regions are keyed ids, so a reader of the names
cannot try out texts. The module knows no file: the process keeps the names from one run to the next, and only if the
root changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from cache.tree.namespaces import Segment
from cache.tree.radix import RadixTree, token_slice

NAME_BYTES = 8


def _name(before: bytes, region: bytes, block: bytes) -> bytes:
    framed = before + len(region).to_bytes(2, "little") + region + block
    return blake2b(framed, digest_size=NAME_BYTES).digest()


def names(tree: RadixTree) -> bytes:
    """Returns the names of every block that can be found. O(tree); it is for the end of a process."""
    found = bytearray()
    stack = [(tree.root, b"")]
    while stack:
        node, before = stack.pop()
        width = tree.block_size * node.tokens.itemsize
        raw = node.tokens.tobytes()
        for start in range(0, len(raw), width):
            before = _name(before, node.region, raw[start : start + width])
            found += before
        stack.extend((child, before) for child in node.children.values())
    return bytes(found)


class Predecessor:
    def __init__(self, data: bytes, block_size: int) -> None:
        self._names = {data[i : i + NAME_BYTES] for i in range(0, len(data), NAME_BYTES)}
        self._block_size = block_size

    def knew(self, path: tuple[Segment, ...], tokens: Sequence[int], num_blocks: int) -> bool:
        """Says whether the first `num_blocks` blocks of a prompt were cached. O(num_blocks)."""
        before, depth, size = b"", 0, self._block_size
        for segment in path:
            while depth < min(segment.end, num_blocks):
                block = token_slice(tokens, depth * size, (depth + 1) * size).tobytes()
                before, depth = _name(before, segment.region, block), depth + 1
        return before in self._names
