"""A step with prefill in it, as it is sent to the device: decode rows by their device rows, chunks with all their
tokens.

It knows plan.py's rows and the paged layout. It does not know the model; nothing here outlives its step.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from kernels.arguments.batch import DeviceRows, PagedBatch, RowTensors
from kernels.arguments.draws import DrawTensors
from workers.engine.device.device_rows import draw_tensors, numbers
from workers.engine.device.graph_buffers import TableViews
from workers.engine.kv.transport import ALIGNED
from workers.engine.model.hf import Trees
from workers.engine.values import token_tree
from workers.engine.values.layout import Tree
from workers.engine.values.plan import Row, SampleSpec


def _integers() -> array[int]:
    return array("i")


@dataclass(slots=True)
class MixedStep:
    """A step whose rows with one token come first in the pass. Arrays travel to the device in one copy, in the order of
    `parts`."""

    rows: Sequence[Row]
    block_size: int
    decode: list[Row] = field(default_factory=list)
    chunks: list[Row] = field(default_factory=list)
    """Chunks, with those that carry a token tree after the others."""
    num_trees: int = 0
    starts: list[int] = field(default_factory=list)
    """The index in the pass of each given row's first token."""
    draws: list[SampleSpec] = field(default_factory=list)
    fed_back: list[int] = field(default_factory=list)
    """Device rows with one draw: the drawn token becomes their last one."""
    active: array[int] = field(default_factory=_integers)
    tokens: array[int] = field(default_factory=_integers)
    positions: array[int] = field(default_factory=_integers)
    slots: array[int] = field(default_factory=_integers)
    chunk_rows: array[int] = field(default_factory=_integers)
    seq_lens: array[int] = field(default_factory=_integers)
    query_starts: array[int] = field(default_factory=lambda: array("i", (0,)))
    views: array[int] = field(default_factory=_integers)
    """Bit masks of the tokens that each token of a tree sees, two 32-bit words each (token_tree.views)."""
    last: array[int] = field(default_factory=_integers)
    """The index in the pass of the token whose logits each draw uses."""
    lines: array[int] = field(default_factory=_integers)
    """The sampling numbers and the position of each draw."""
    feeding: array[int] = field(default_factory=_integers)
    """The index of the draw of each row that is fed back, and its device row."""

    def parts(self) -> tuple[array[int], ...]:
        return (
            self.active,
            self.tokens,
            self.positions,
            self.slots,
            self.chunk_rows,
            self.seq_lens,
            self.query_starts,
            self.views,
            self.last,
            self.lines,
            self.feeding,
        )

    @property
    def num_tokens(self) -> int:
        return len(self.decode) + len(self.tokens)


def mix(rows: Sequence[Row], block_size: int) -> MixedStep:
    step = MixedStep(rows, block_size)
    step.decode = [row for row in rows if len(row.tokens) == 1]
    step.active.extend(row.row_id for row in step.decode)
    step.starts = [0] * len(rows)
    order = sorted(range(len(rows)), key=lambda place: _kind(rows[place]))
    for begun, place in enumerate(order[: len(step.decode)]):
        step.starts[place] = begun
    for place in order[len(step.decode) :]:
        step.starts[place] = step.num_tokens
        _add_chunk(step, rows[place])
    for row, start in zip(rows, step.starts, strict=True):
        _add_draws(step, row, start)
    return step


def _kind(row: Row) -> int:
    """Returns the kind of a row: 0 for a decode row, 1 for a chunk, 2 for a token tree. Attention runs separately for
    each kind."""
    return 2 if isinstance(row.layout, Tree) else int(len(row.tokens) != 1)


def _add_chunk(step: MixedStep, row: Row) -> None:
    end = row.start + len(row.tokens)
    step.chunks.append(row)
    step.tokens.extend(row.tokens)
    if isinstance(row.layout, Tree):
        step.num_trees += 1
        step.positions.extend(token_tree.positions(row.start, row.layout.parents))
        step.views.frombytes(array("q", token_tree.views(row.layout.parents)).tobytes())
    else:
        step.positions.extend(range(row.start, end))
    for first, last, slot in _runs(row, end, step.block_size):
        step.slots.extend(range(slot, slot + last - first))
    step.chunk_rows.append(row.row_id)
    step.seq_lens.append(end)
    step.query_starts.append(len(step.tokens))


def _runs(row: Row, end: int, block_size: int) -> Iterator[tuple[int, int, int]]:
    """Yields, for each part of a row's tokens that lies in one block, its first position, its end, and the slot of the
    first."""
    first = row.start
    while first < end:
        index, offset = divmod(first, block_size)
        last = min(end, first - offset + block_size)
        yield first, last, row.block_table[index] * block_size + offset
        first = last


def _add_draws(step: MixedStep, row: Row, start: int) -> None:
    if len(row.draws) == 1:
        step.feeding.extend((len(step.draws), row.row_id))
        step.fed_back.append(row.row_id)
    last = start + len(row.tokens) - 1
    for place, draw in enumerate(row.draws):
        step.last.append(last - row.num_proposed + (place if row.num_proposed else 0))
        step.lines += numbers(draw)
        step.lines.append(draw.position)
    step.draws += row.draws


@dataclass(frozen=True, slots=True)
class MixedTensors:
    """The arrays of a mixed step, as tensors on the device."""

    active: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    chunk_rows: torch.Tensor
    seq_lens: torch.Tensor
    query_starts: torch.Tensor
    views: torch.Tensor
    last: torch.Tensor
    lines: torch.Tensor
    feeding: torch.Tensor

    def chunks(self, step: MixedStep, rows: DeviceRows) -> PagedBatch | None:
        return self._batch(step, rows, 0, len(step.chunks) - step.num_trees)

    def trees(self, step: MixedStep, rows: DeviceRows) -> Trees | None:
        end = len(step.chunks)
        batch = self._batch(step, rows, end - step.num_trees, end)
        return None if batch is None else Trees(batch, self.views.view(torch.int64))

    def _batch(self, step: MixedStep, rows: DeviceRows, first: int, end: int) -> PagedBatch | None:
        """Returns the batch of the chunks from `first` to `end`; their block tables are those of their device rows."""
        if first == end:
            return None
        chunks, lens = step.chunks[first:end], step.seq_lens[first:end]
        num_blocks = [-(-length // step.block_size) for length in lens]
        widest = rows.block_table[:, : max(num_blocks)]
        table = widest.index_select(0, self.chunk_rows[first:end])
        query_lens = [len(row.tokens) for row in chunks]
        starts = self.query_starts[first : end + 1]
        given = RowTensors(
            table,
            self.seq_lens[first:end] if first == 0 else self.seq_lens[first:end].clone(),
            starts if first == 0 else starts - step.query_starts[first],
            max(lens),
            max(query_lens),
        )
        contexts = [row.start for row in chunks]
        views = TableViews(table, num_blocks)
        return PagedBatch(query_lens, contexts, views, step.block_size, given)

    def draws(self) -> DrawTensors:
        lines = self.lines.view(-1, 7).T
        # The lines are padded, so that each one begins at a multiple of 16 bytes (transport).
        numbers = torch.nn.functional.pad(lines[:6], (0, -lines.shape[1] % ALIGNED)).contiguous()
        return draw_tensors(numbers[:, : lines.shape[1]], lines[6].long())
