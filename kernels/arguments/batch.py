"""The ragged rows of one packed attention call, prepared once per step and read by every layer.

It knows lengths and block ids. It does not know sequences, layers or what the tokens are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, Self, TypeVar

import torch

from kernels.arguments.splits import DecodeWorkspace


@dataclass(frozen=True)
class Slots:
    """The slots that the tokens of a step are stored in."""

    slots: torch.Tensor
    """int32 or int64 per token: block id * block size + offset in the block; -1 stores nothing."""
    block_size: int
    _rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.slots)

    @cached_property
    def stored(self) -> torch.Tensor | None:
        """Indices of the tokens whose slot is not -1; None means all of them."""
        keep = self.slots >= 0
        return None if bool(keep.all()) else keep.nonzero().squeeze(1)

    @cached_property
    def distinct(self) -> bool:
        """True if no slot is written twice."""
        slots = self.slots if self.stored is None else self.slots[self.stored]
        return len(slots.unique()) == len(slots)

    def head_rows(self, num_kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the rows of the stored tokens' keys and of their values, in the order token, head. They index the
        layer seen as `[num_blocks * 2 * KVH * block_size, head_dim]`."""
        if num_kv_heads not in self._rows:
            slots = (self.slots if self.stored is None else self.slots[self.stored]).long()
            heads = torch.arange(num_kv_heads, device=slots.device) * self.block_size
            half = num_kv_heads * self.block_size
            first = slots // self.block_size * (2 * half) + slots % self.block_size
            keys = (first[:, None] + heads).view(-1)
            self._rows[num_kv_heads] = (keys, keys + half)
        return self._rows[num_kv_heads]


@dataclass(frozen=True)
class RowTensors:
    """The tensors that a compiled kernel reads of a batch's rows: int32, on the device. The two bounds are known to the
    host and determine grids; in a captured step they are those of the whole bucket."""

    block_table: torch.Tensor
    """`[num_rows, max_blocks]`; entries after a row's last block are 0, the null block."""
    seq_lens: torch.Tensor
    """`[num_rows]`: context and queries together; 0 for a padding row."""
    query_starts: torch.Tensor
    """`[num_rows + 1]`: first query of each row in the packed order."""
    max_seq_len: int
    max_query_len: int


class Derived(Protocol):
    """Data that a kernel derives from a batch, once for all layers of one shape."""

    @classmethod
    def of(cls, batch: PagedBatch, kv_heads: int, head_dim: int) -> Self: ...


D = TypeVar("D", bound=Derived)


@dataclass(frozen=True)
class PagedBatch:
    """A batch of rows: row i has `query_lens[i]` new tokens after `context_lens[i]` older ones; the KV of both is in
    the blocks `block_tables[i]`. Queries are packed, row after row, in the order of the lists.

    The lists remain on the host, so that no layer waits for the device; kernels read the tensors.
    """

    query_lens: list[int]
    context_lens: list[int]
    block_tables: Sequence[torch.Tensor]
    """The block ids of each row, int64, on the device."""
    block_size: int
    given: RowTensors | None = None
    """Tensors that outlive a step (a captured step reads the same ones again and again); None means that they are built
    from the lists."""
    workspace: DecodeWorkspace | None = None
    """The workspace of decode attention, which outlives a step too; None means that every call makes its own."""
    _row_ids: dict[tuple[int, int, int], torch.Tensor] = field(default_factory=dict, repr=False)
    _masks: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict, repr=False)
    _derived: dict[tuple[type, int, int], Derived] = field(default_factory=dict, repr=False)

    @property
    def num_rows(self) -> int:
        return len(self.query_lens)

    @cached_property
    def starts(self) -> list[int]:
        """First query of each row in the packed order, and the number of all queries at the end."""
        starts = [0]
        for length in self.query_lens:
            starts.append(starts[-1] + length)
        return starts

    @cached_property
    def tensors(self) -> RowTensors:
        if self.given is not None:
            return self.given
        seq_lens = [c + q for c, q in zip(self.context_lens, self.query_lens, strict=True)]
        device = self.block_tables[0].device
        table = torch.nn.utils.rnn.pad_sequence(list(self.block_tables), batch_first=True)
        return RowTensors(
            table.to(torch.int32),
            torch.tensor(seq_lens, dtype=torch.int32, device=device),
            torch.tensor(self.starts, dtype=torch.int32, device=device),
            max(seq_lens),
            max(self.query_lens),
        )

    def derived(self, kind: type[D], kv_heads: int, head_dim: int) -> D:
        key = (kind, kv_heads, head_dim)
        found = self._derived.get(key)
        if found is None:
            found = self._derived[key] = kind.of(self, kv_heads, head_dim)
        assert isinstance(found, kind)
        return found

    def first_key(self, row: int, window: int) -> int:
        """Returns the first token that any query of the row may see, rounded down to a block (window 0 means no
        window)."""
        if window == 0:
            return 0
        oldest = max(0, self.context_lens[row] + 1 - window)
        return oldest - oldest % self.block_size

    def kv_row_ids(self, row: int, num_kv_heads: int, window: int) -> torch.Tensor:
        """Returns rows of the layer seen as `[num_blocks * 2 * KVH, block_size * head_dim]`, in the order K before V,
        head, block: one `index_select` of them is `[2, KVH, tokens, head_dim]`."""
        key = (row, num_kv_heads, window)
        if key not in self._row_ids:
            blocks = self.block_tables[row][self.first_key(row, window) // self.block_size :]
            halves = torch.arange(2 * num_kv_heads, device=blocks.device)
            ids = blocks[None, :] * (2 * num_kv_heads) + halves[:, None]
            self._row_ids[key] = ids.reshape(-1)
        return self._row_ids[key]

    def mask(self, row: int, window: int) -> torch.Tensor:
        """Returns `[query_len, keys]`, true if the query sees the key; keys begin at `first_key`."""
        key = (row, window)
        if key not in self._masks:
            context, length = self.context_lens[row], self.query_lens[row]
            first, device = self.first_key(row, window), self.block_tables[row].device
            queries = torch.arange(context, context + length, device=device)[:, None]
            keys = torch.arange(first, context + length, device=device)[None, :]
            seen = keys <= queries
            if window:
                seen &= keys > queries - window
            self._masks[key] = seen
        return self._masks[key]


@dataclass(frozen=True)
class DeviceRows:
    """State of running sequences on the device, one row each: the host only sends changes. A row's `positions[i]` is
    the position of its last token, whose KV the next step writes; the block of that position is in the table by
    then."""

    last_tokens: torch.Tensor
    """`[max_rows]`, int32 or int64."""
    positions: torch.Tensor
    """`[max_rows]` int32, from 0."""
    block_table: torch.Tensor
    """`[max_rows, max_blocks]` int32; unused entries 0."""


@dataclass(frozen=True)
class StepInputs:
    """The static buffers that a captured decode step of `bucket` rows reads."""

    token_ids: torch.Tensor
    """`[bucket]`, int32 or int64. transformers' embeddings take both; its own type is int64."""
    positions: torch.Tensor
    """`[bucket]`, int32 or int64 too."""
    slots: torch.Tensor
    """`[bucket]`, int32 or int64 (`Slots`)."""
    seq_lens: torch.Tensor
    """`[bucket]` int32 (`RowTensors`)."""
    block_table: torch.Tensor
    """`[bucket, max_blocks]` int32 (`RowTensors`): the block tables of the rows."""
