"""The blocks that the tables of one attempt contain, each counted once. The module knows block ids and tables.

Tables that have a block in common have all blocks before it in common, too. So the first table is kept, each table says
how many of its leading blocks are those of the first one, and only the blocks behind them are counted one by one. A
change costs time for the blocks that change, not for the number of tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


class HeldBlocks:
    __slots__ = ("_first", "_leading", "_rest")

    def __init__(self) -> None:
        self._first: list[int] = []
        """The first table, as it was when it came. It may have left since."""
        self._leading: Counter[int] = Counter()
        """Number of tables by the number of leading blocks that they have in common with the first one."""
        self._rest: Counter[int] = Counter()
        """Number of tables that contain a block behind their leading ones, by block."""

    @property
    def number(self) -> int:
        return max(self._leading, default=0) + len(self._rest)

    def add(self, table: list[int]) -> int:
        """Adds a table. Returns the number of its leading blocks, which the caller keeps for the calls below."""
        if not self._leading:
            self._first = list(table)
        return self.fork(table, _num_common(self._first, table))

    def fork(self, table: Sequence[int], num_leading: int = 0) -> int:
        """Adds a table with this number of leading blocks: those of the table that it was forked from, or 0 for one
        that has nothing in common with others. Returns the number."""
        self._leading[num_leading] += 1
        self._rest.update(table[num_leading:])
        return num_leading

    def append(self, block: int) -> None:
        """Notes that a block was appended to a table."""
        self._rest[block] += 1

    def replace(self, table: Sequence[int], num_leading: int, index: int, block: int) -> int:
        """Notes that `block` will stand at `index` of the table. Returns the number of its leading blocks from then
        on."""
        self._rest[block] += 1
        if index >= num_leading:
            self._drop(table[index])
            return num_leading
        self._leave(num_leading)
        self._leading[index] += 1
        self._rest.update(table[index + 1 : num_leading])
        return index

    def remove(self, table: Sequence[int], num_leading: int) -> None:
        self._leave(num_leading)
        for block in table[num_leading:]:
            self._drop(block)

    def _leave(self, num_leading: int) -> None:
        self._leading[num_leading] -= 1
        if not self._leading[num_leading]:
            del self._leading[num_leading]

    def _drop(self, block: int) -> None:
        self._rest[block] -= 1
        if not self._rest[block]:
            del self._rest[block]


def _num_common(first: list[int], table: list[int]) -> int:
    if table[: len(first)] == first:
        return len(first)
    pairs = enumerate(zip(first, table, strict=False))
    return next((index for index, (mine, theirs) in pairs if mine != theirs), min(len(first), len(table)))
