"""The buffers of a decode step stay at one address, so that a recorded step reads and writes them again and again.

It knows shapes. It does not know which rows are in a step, nor what a pass computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import torch

from kernels.arguments.batch import PagedBatch, RowTensors, Slots, StepInputs
from kernels.arguments.draws import DrawTensors
from kernels.arguments.shared import SharedGroups
from kernels.arguments.splits import DecodeWorkspace, most_splits, most_splits_beside_shared
from workers.engine.device.device_rows import Field, draw_tensors
from workers.engine.device.shared_rows import Group
from workers.engine.model.hf import StepContext
from workers.engine.values.plan import Row


class TableViews(Sequence[torch.Tensor]):
    """The block ids of each row. A view is cut from the table only when it is asked for, and a compiled kernel never
    asks."""

    def __init__(self, table: torch.Tensor, num_blocks: Sequence[int]) -> None:
        self._table = table
        self._num_blocks = num_blocks

    def __len__(self) -> int:
        return len(self._num_blocks)

    @overload
    def __getitem__(self, row: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, row: slice) -> Sequence[torch.Tensor]: ...
    def __getitem__(self, row: int | slice) -> torch.Tensor | Sequence[torch.Tensor]:
        if isinstance(row, slice):
            return [self[index] for index in range(len(self))[row]]
        return self._table[row, : self._num_blocks[row]]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self[row] for row in range(len(self)))


class StaticBatch:
    def __init__(
        self,
        max_rows: int,
        max_blocks: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
        attention: tuple[int, int] | None,
        shared_attention: bool = False,
    ) -> None:
        """`attention` has the number of query heads and their size if compiled attention needs a workspace for partial
        sums, else it is None. With `shared_attention` the workspace also holds the partial sums of prefixes that rows
        read together."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._block_size = block_size
        self._max_seq_len = max_blocks * block_size
        self.active = torch.full((max_rows,), -1, dtype=torch.int32, device=device)
        """The device row of each row of the step; -1 marks padding."""
        self._inputs = StepInputs(
            zeros(max_rows),
            zeros(max_rows),
            zeros(max_rows),
            zeros(max_rows, dtype=torch.int32),
            zeros(max_rows, max_blocks, dtype=torch.int32),
        )
        self._query_starts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._lines = torch.ones((len(Field) - Field.TEMPERATURE, max_rows), dtype=torch.int32, device=device)
        self._workspace: DecodeWorkspace | None = None
        if attention is not None:
            bound = most_splits_beside_shared if shared_attention else most_splits
            splits = bound(self._max_seq_len)
            self._workspace = DecodeWorkspace.of(max_rows, *attention, splits, device)
        self.logits = zeros(max_rows, vocab_size, dtype=torch.float32)
        self.drawn = zeros(max_rows)

    def inputs(self, size: int) -> StepInputs:
        mine = self._inputs
        return StepInputs(
            mine.token_ids[:size],
            mine.positions[:size],
            mine.slots[:size],
            mine.seq_lens[:size],
            mine.block_table[:size],
        )

    def gather_draws(self, state: torch.Tensor, size: int) -> None:
        """Gathers the sampling numbers of the active rows. It is called whenever other rows become active or their
        numbers change."""
        rows = self.active[:size].clamp(min=0)
        self._lines[:, :size] = state[Field.TEMPERATURE :].index_select(1, rows)

    def draws(self, size: int) -> DrawTensors:
        """Returns the draws of the first `size` rows. A token is drawn for the position after that of the token that
        was fed in."""
        return draw_tensors(self._lines[:, :size], self._inputs.positions[:size] + 1)

    def row_tensors(self, size: int, max_seq_len: int) -> RowTensors:
        mine = self._inputs
        starts = self._query_starts[: size + 1]
        return RowTensors(mine.block_table[:size], mine.seq_lens[:size], starts, max_seq_len, 1)

    def context(self, size: int, context_lens: Sequence[int] | None) -> StepContext:
        """Returns the context of a pure decode step of `size` rows. `context_lens` are those of the rows that are no
        padding, for ops that read lists; without them every bound is the largest possible one."""
        slots = Slots(self._inputs.slots[:size], self._block_size)
        if context_lens is not None:
            return StepContext(slots, self.decode_batch(context_lens), None)
        given = self.row_tensors(size, self._max_seq_len)
        lens = ([1] * size, [0] * size)
        batch = PagedBatch(*lens, [], self._block_size, given, self._workspace)
        return StepContext(slots, batch, None)

    def shared_context(self, size: int, rows: Sequence[Row], groups: Sequence[Group]) -> StepContext:
        """Returns the same as `context`, with rows that read their common prefix together."""
        batch = self.decode_batch([row.start for row in rows])
        slots = Slots(self._inputs.slots[:size], self._block_size)
        # The tables are not taken from the buffers: the pass that reads the buffers writes them first.
        tables = [
            torch.tensor(rows[members[0]].block_table[:number], device=self.active.device) for members, number in groups
        ]
        return StepContext(slots, batch, None, shared=SharedGroups.of(batch, groups, tables))

    def decode_batch(self, context_lens: Sequence[int]) -> PagedBatch:
        """Returns the first rows of the buffers, with their lengths as lists too."""
        number, lens = len(context_lens), list(context_lens)
        tables = TableViews(self._inputs.block_table, [length // self._block_size + 1 for length in lens])
        given = self.row_tensors(number, max(lens) + 1)
        return PagedBatch([1] * number, lens, tables, self._block_size, given, self._workspace)
