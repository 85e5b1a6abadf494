"""Groups rows in two launches and without atomics: rows of a group keep their ascending order.

It knows group numbers and tiles. Each program handles one group and reads all ids: a few hundred kilobytes at most,
from the second-level cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

import kernels.triton.device  # noqa: F401  # sets how Triton rounds, before anything is compiled
from kernels.reference.group_rows import RowGroups
from kernels.triton.specimen import Budget, Specimen

_BLOCK = 1024


@triton.jit(do_not_specialize=["num_rows"])
def _count(counts, ids, num_rows, BLOCK: tl.constexpr):
    group = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    found = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_rows, BLOCK):
        other = tl.load(ids + start + lane, mask=start + lane < num_rows, other=-1)
        found += (other == group).to(tl.int32)
    tl.store(counts + group, tl.sum(found, axis=0))


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def _place(
    rows,
    tiles,
    counts,
    ids,
    num_rows,
    num_tiles,
    num_groups,
    TILE: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    group = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    every = tl.arange(0, BLOCK_GROUPS)
    tiles_of = (tl.load(counts + every, mask=every < num_groups, other=0) + TILE - 1) // TILE
    first = tl.sum(tl.where(every < group, tiles_of, 0), axis=0)
    behind = tl.sum(tl.where(every <= group, tiles_of, 0), axis=0)
    for start in range(first, behind, BLOCK):
        tl.store(tiles + start + lane, group, mask=start + lane < behind)
    if group == num_groups - 1:
        for start in range(behind, num_tiles, BLOCK):
            tl.store(tiles + start + lane, -1, mask=start + lane < num_tiles)
    placed = first * TILE
    for start in range(0, num_rows, BLOCK):
        row = start + lane
        mine = tl.load(ids + row, mask=row < num_rows, other=-1) == group
        ones = mine.to(tl.int32)
        tl.store(rows + placed + tl.cumsum(ones, axis=0) - 1, row, mask=mine)
        placed += tl.sum(ones, axis=0)
    padding = placed + tl.arange(0, TILE)
    tl.store(rows + padding, -1, mask=padding < behind * TILE)


def group_rows(groups: RowGroups) -> None:
    """Does the same as its twin in `kernels.reference.group_rows`."""
    num_rows, num_groups = len(groups.ids), len(groups.counts)
    _count[(num_groups,)](groups.counts, groups.ids, num_rows, BLOCK=_BLOCK, num_warps=4)
    _place[(num_groups,)](
        groups.rows,
        groups.tiles,
        groups.counts,
        groups.ids,
        num_rows,
        len(groups.tiles),
        num_groups,
        TILE=groups.tile,
        BLOCK_GROUPS=triton.next_power_of_2(num_groups),
        BLOCK=_BLOCK,
        num_warps=4,
    )


def specimens(capability: int) -> Iterator[Specimen]:
    number = torch.int32
    block = {"BLOCK": _BLOCK}
    yield Specimen("group_rows count", _count, (number, number, 512), block, Budget(64))
    yield Specimen(
        "group_rows place, 128 groups",
        _place,
        (number, number, number, number, 512, 160, 128),
        {"TILE": 16, "BLOCK_GROUPS": 128, **block},
        Budget(96),
    )
