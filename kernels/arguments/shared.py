"""Groups of rows of a decode batch that begin with the same blocks, and the rule for when it pays to read those once
for all of them.

It knows rows and block ids. It does not know prefix nodes: the caller says which rows share blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.arguments.batch import PagedBatch
from kernels.arguments.splits import most_shared_splits

MIN_SHARED_LEN, MIN_ROWS = 512, 8


def sharing_pays(shared_len: int, num_rows: int, window: int = 0) -> bool:
    """Returns whether a group is worth three launches instead of two, by a rule that no measured table backs yet. In a
    layer with a window each row sees another end of the prefix, or none of it."""
    return window == 0 and shared_len >= MIN_SHARED_LEN and num_rows >= MIN_ROWS


@dataclass(frozen=True)
class SharedGroups:
    """Groups of rows of a batch; a row is in one group or in none. Tensors are int32, on the device; the bounds are
    known to the host and determine grids."""

    order: torch.Tensor
    """`[num_grouped_rows]`: rows of the batch, group after group."""
    starts: torch.Tensor
    """`[num_groups + 1]`: first index of each group in `order`."""
    block_table: torch.Tensor
    """`[num_groups, max_shared_blocks]`: the blocks that the rows of a group begin with."""
    shared_lens: torch.Tensor
    """`[num_groups]`: tokens in those blocks, all of them filled."""
    own_starts: torch.Tensor
    """`[num_rows]`: first token after the shared part; 0 for a row in no group."""
    places: torch.Tensor
    """`[num_rows]`: index of a row in `order`; 0 for a row in no group."""
    max_group_rows: int
    max_shared_len: int
    max_own_len: int
    """Largest number of tokens that any row has from `own_starts` on."""

    @property
    def num_groups(self) -> int:
        return len(self.shared_lens)

    @property
    def num_splits(self) -> int:
        """Largest number of parts that a shared prefix is cut into."""
        return most_shared_splits(self.max_shared_len)

    @classmethod
    def of(
        cls,
        batch: PagedBatch,
        groups: Sequence[tuple[Sequence[int], int]],
        tables: Sequence[torch.Tensor] | None = None,
    ) -> SharedGroups:
        """Builds the tensors. `groups` has rows, and the number of first blocks that they share; there is at least one
        group. `tables` has those blocks, for callers that write the batch's own tables later."""
        lens = [context + 1 for context in batch.context_lens]
        own_starts, places = [0] * batch.num_rows, [0] * batch.num_rows
        order: list[int] = []
        starts = [0]
        for rows, num_blocks in groups:
            shared_len = num_blocks * batch.block_size
            for row in rows:
                assert own_starts[row] == 0 < shared_len <= lens[row], (row, shared_len)
                own_starts[row], places[row] = shared_len, len(order)
                order.append(row)
            starts.append(len(order))
        if tables is None:
            tables = [batch.block_tables[rows[0]][:num_blocks] for rows, num_blocks in groups]

        def tensor(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=tables[0].device)

        return cls(
            tensor(order),
            tensor(starts),
            torch.nn.utils.rnn.pad_sequence(list(tables), batch_first=True).to(torch.int32),
            tensor([num_blocks * batch.block_size for _, num_blocks in groups]),
            tensor(own_starts),
            tensor(places),
            max(len(rows) for rows, _ in groups),
            max(num_blocks for _, num_blocks in groups) * batch.block_size,
            max(length - first for length, first in zip(lens, own_starts, strict=True)),
        )
