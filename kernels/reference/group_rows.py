"""Groups rows: tokens by expert, tokens by adapter. This is the plain-torch twin of
`kernels.triton.products.group_rows`.

It knows group numbers and tiles. It does not know what a group is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RowGroups:
    """The rows of each group in ascending order, with every group padded to whole tiles, so that a program that takes
    one tile sees one group. `ids` are given, the op `group_rows` writes the rest; all tensors are int32, on the device,
    and of sizes that the host knows without reading the ids."""

    ids: torch.Tensor
    """`[num_rows]`: group of each row; -1 means none, and the row appears nowhere."""
    rows: torch.Tensor
    """`[num_tiles * tile]`: rows by group; -1 pads a group's last tile. Entries after the last used tile may be
    anything."""
    tiles: torch.Tensor
    """`[num_tiles]`: the group of each tile, -1 after the last used one."""
    counts: torch.Tensor
    """`[num_groups]`: number of rows of each group."""
    tile: int

    @classmethod
    def of(cls, ids: torch.Tensor, num_groups: int, tile: int) -> RowGroups:
        """Allocates the tensors for these ids. A group leaves at most one tile partly empty, and a used tile has at
        least one row."""
        num_tiles = min(len(ids), len(ids) // tile + num_groups)
        sizes = (num_tiles * tile, num_tiles, num_groups)
        rows, tiles, counts = (torch.empty(n, dtype=torch.int32, device=ids.device) for n in sizes)
        return cls(ids, rows, tiles, counts, tile)


def group_rows(groups: RowGroups) -> None:
    """Writes `rows`, `tiles` and `counts` from `ids`."""
    num_groups, tile = len(groups.counts), groups.tile
    groups.tiles.fill_(-1)
    groups.counts.copy_(torch.bincount(groups.ids[groups.ids >= 0], minlength=num_groups))
    first = 0
    for group in range(num_groups):
        members = (groups.ids == group).nonzero().squeeze(1)
        used = -(-len(members) // tile)
        groups.tiles[first : first + used] = group
        place = groups.rows[first * tile : (first + used) * tile]
        place.fill_(-1)
        place[: len(members)] = members.to(torch.int32)
        first += used
