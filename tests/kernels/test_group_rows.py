"""Rows put together by group: twin and Triton kernel against plain lists."""

from __future__ import annotations

import pytest
import torch
from guarded import Guarded
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kernels import dispatch
from kernels.reference.group_rows import RowGroups

TWIN = dispatch.choose(torch.device("cpu"))
TRITON = dispatch.choose(torch.device("cpu"), {"group_rows"})
BOTH = pytest.mark.parametrize("ops", [TWIN, TRITON], ids=["twin", "triton"])


def grouped(ops: dispatch.Ops, ids: list[int], num_groups: int, tile: int) -> RowGroups:
    shape = RowGroups.of(torch.tensor(ids, dtype=torch.int32), num_groups, tile)
    parts = {n: Guarded(getattr(shape, n).shape, torch.int32) for n in ("rows", "tiles", "counts")}
    groups = RowGroups(shape.ids, **{n: part.tensor for n, part in parts.items()}, tile=tile)
    ops.weights.group_rows(groups)
    for part in parts.values():
        part.check()
    return groups


def check(groups: RowGroups, ids: list[int], num_groups: int) -> None:
    """Every row once, in its group's tiles, in order; what is left of a tile is -1, unused tiles are behind."""
    tile, tiles, rows = groups.tile, groups.tiles.tolist(), groups.rows.tolist()
    expected_tiles, expected_rows = [], []
    for group in range(num_groups):
        members = [row for row, own in enumerate(ids) if own == group]
        assert groups.counts[group] == len(members)
        used = -(-len(members) // tile)
        expected_tiles += [group] * used
        expected_rows += members + [-1] * (used * tile - len(members))
    assert len(expected_tiles) <= len(tiles)
    assert tiles == expected_tiles + [-1] * (len(tiles) - len(expected_tiles))
    assert rows[: len(expected_rows)] == expected_rows


@BOTH
@given(
    st.integers(1, 9).flatmap(
        lambda n: st.tuples(st.just(n), st.lists(st.integers(-1, n - 1), min_size=1, max_size=80))
    ),
    st.sampled_from([1, 4, 16]),
)
@example((1, [0]), 16)
@example((3, [-1, -1]), 4)
@example((4, [2] * 17), 16)
@example((8, list(range(8))), 4)
@settings(max_examples=30, deadline=None)
def test_rows_lie_by_group_in_whole_tiles(ops, drawn, tile):
    num_groups, ids = drawn
    check(grouped(ops, ids, num_groups, tile), ids, num_groups)


@BOTH
@pytest.mark.parametrize("num_rows", [1023, 1024, 1025, 2100])
def test_more_rows_than_a_block_of_ids_are_counted_on(ops, num_rows):
    ids = (torch.arange(num_rows) * 7 % 5 - 1).tolist()
    check(grouped(ops, ids, 4, 16), ids, 4)


def test_more_unused_tiles_than_a_block_are_marked():
    ids = [-1] * 2000
    check(grouped(TRITON, ids, 2, 1), ids, 2)
