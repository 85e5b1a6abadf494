"""Block ids and their counts of owners. The module knows integers only: neither the content of a block nor the tree.

Block 0 is the null block, the target of padding rows: it is never handed out. Every other block has a count of owners
(block tables that name it, plus one for the tree). At 0 it is on the free stack and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence

NULL_BLOCK = 0


class BlockPool:
    """A LIFO stack of free ids and one count per block. Every operation is O(blocks named)."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError("a pool needs the null block and at least one more")
        self.num_blocks = num_blocks
        self._counts = [0] * num_blocks
        # The lowest ids are on top. The order is LIFO, as the block freed last is the likeliest to be still in the
        # device's cache.
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def alloc(self, n: int) -> list[int] | None:
        """Takes n blocks, each with count 1. Returns None if there are fewer; then none is taken."""
        if n < 0:
            raise ValueError(f"cannot allocate {n} blocks")
        if n > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(n)]
        for block in taken:
            self._counts[block] = 1
        return taken

    def share(self, block: int) -> None:
        """Adds an owner to a block that has at least one."""
        if block == NULL_BLOCK or self._counts[block] == 0:
            raise RuntimeError(f"block {block} has no owner to share it with")
        self._counts[block] += 1

    def free(self, block: int) -> int:
        """Removes an owner. The last one puts the block back on the stack. Returns the number of owners left."""
        if block == NULL_BLOCK or self._counts[block] == 0:
            raise RuntimeError(f"block {block} is freed twice")
        self._counts[block] -= 1
        if self._counts[block] == 0:
            self._free.append(block)
        return self._counts[block]

    def refcount(self, block: int) -> int:
        return self._counts[block]

    def counts(self) -> Sequence[int]:
        """Returns the number of owners of each block (for invariants.py)."""
        return self._counts

    def free_ids(self) -> Sequence[int]:
        """Returns the free stack, bottom first (for invariants.py and dumps)."""
        return tuple(self._free)
