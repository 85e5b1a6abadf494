"""Finds the decode rows of a step that begin with the same blocks. Rows that matched one prefix node hold that node's
own blocks, so equal ids show what the tree would show. It knows block ids, but no tree and no tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from kernels.arguments.shared import sharing_pays
from workers.engine.values.plan import Row

Group = tuple[list[int], int]
"""Indices of rows, and the number of first blocks that they have in common."""


def shared_groups(rows: Sequence[Row], block_size: int, pays: Callable[[int, int], bool] = sharing_pays) -> list[Group]:
    """Returns groups whose prefix is worth reading once; a row is in one group at most. Rows are sorted by their
    tables, so that those with a long common start are neighbours; from each start on, the group that saves most is
    taken. O(rows x blocks)."""
    tables = {index: tuple(row.block_table[: row.start // block_size]) for index, row in enumerate(rows)}
    order = sorted(tables, key=tables.__getitem__)
    common = [_common(tables[a], tables[b]) for a, b in itertools.pairwise(order)]
    groups: list[Group] = []
    first = 0
    while first < len(order):
        best, shared = (0, 0, 0), len(tables[order[first]])
        for last in range(first + 1, len(order)):
            shared = min(shared, common[last - 1])
            if not pays(shared * block_size, len(order)):
                break  # too short for any number of rows
            number = last - first + 1
            if pays(shared * block_size, number):
                best = max(best, (shared * (number - 1), number, shared))
        _, number, shared = best
        if number:
            groups.append((sorted(order[first : first + number]), shared))
        first += max(1, number)
    return groups


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))
