"""Decode attention in plain torch: rows are cut into chunks of fixed positions, and chunks of equal size are one
product.

It knows tensors and blocks. A row's context is cut at multiples of `CHUNK` tokens, whatever the other rows are; a chunk
that several rows have in their tables is read once for all of them, and the results of a row's chunks are merged in
their order. So a row's sums do not depend on the other rows, though its time does. Source of the sharing: Hydragen
(arXiv 2402.05099); of the merge: FlashAttention (arXiv 2205.14135).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from kernels.arguments.batch import PagedBatch

CHUNK = 512
_TAILS = (64, 128, 256, 384, CHUNK)
"""Padded lengths of the tokens after the last whole chunk; the padding consists of some of the row's own tokens, which
are then masked."""
_MIN_QUERIES = 4
"""Least number of queries of a product: products of one or two queries are summed in another order than those of
more."""
_ELEMENTS = 1 << 20
"""Number of key elements that are processed at a time: they and their values fit into a core's cache."""


@dataclass(frozen=True)
class Part:
    """Chunks of one length with equally many readers; they are one product."""

    source: torch.Tensor
    """Rows of the layer seen as `[num_blocks * 2 * KVH, block_size * D]`: K before V, then chunk, head, block."""
    readers: torch.Tensor
    """`[chunks * readers]`: rows of the batch."""
    targets: torch.Tensor
    """`[chunks * readers]`: index of the chunk in its row's context * rows of the batch + row."""
    num_chunks: int
    length: int
    hidden: torch.Tensor | None = None
    """`[chunks, 1, length]`: 0, or -inf after the end."""
    unwritten: torch.Tensor | None = None
    """Indices into the gathered `[2 * chunks * KVH * length]` tokens: those whose slots may hold anything."""

    def to(self, device: torch.device) -> Part:
        """Returns the part for a layer on another device than the CPU, which made it."""
        return replace(
            self,
            source=self.source.to(device),
            readers=self.readers.to(device),
            targets=self.targets.to(device),
            hidden=None if self.hidden is None else self.hidden.to(device),
            unwritten=None if self.unwritten is None else self.unwritten.to(device),
        )


@dataclass(frozen=True)
class ChunkPlan:
    """The parts of all rows, computed once for a step and read by every layer."""

    parts: list[Part]
    num_places: int

    @classmethod
    def of(cls, batch: PagedBatch, kv_heads: int, head_dim: int) -> ChunkPlan:
        most = max(1, _ELEMENTS // (kv_heads * head_dim * CHUNK))
        device = batch.block_tables[0].device
        tables = [table.tolist() for table in batch.block_tables]
        lens = [context + 1 for context in batch.context_lens]
        parts = [
            *_whole_parts(tables, lens, batch.block_size, kv_heads, most),
            *_tail_parts(tables, lens, batch.block_size, kv_heads, most),
        ]
        if device.type != "cpu":
            parts = [part.to(device) for part in parts]
        return cls(parts, 1 + max((length - 1) // CHUNK for length in lens))


def _whole_parts(
    tables: Sequence[list[int]], lens: Sequence[int], block_size: int, kv_heads: int, most: int
) -> Iterator[Part]:
    """Yields the parts of all chunks except the last one of each row."""
    wide = CHUNK // block_size
    readers: dict[tuple[int, ...], list[int]] = {}
    for row, (table, length) in enumerate(zip(tables, lens, strict=True)):
        for place in range((length - 1) // CHUNK):
            blocks = table[place * wide : (place + 1) * wide]
            readers.setdefault((place, *blocks), []).append(row)
    by_number: dict[int, list[tuple[int, ...]]] = {}
    for chunk, rows in readers.items():
        by_number.setdefault(len(rows), []).append(chunk)
    for chunks in by_number.values():
        for first in range(0, len(chunks), most):
            some = chunks[first : first + most]
            rows = [row for chunk in some for row in readers[chunk]]
            targets = [chunk[0] * len(tables) + row for chunk in some for row in readers[chunk]]
            source = _source(torch.tensor([chunk[1:] for chunk in some]), kv_heads)
            yield Part(source, torch.tensor(rows), torch.tensor(targets), len(some), CHUNK)


def _source(blocks: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Returns `Part.source` for blocks `[chunks, blocks]`."""
    heads = torch.arange(2 * kv_heads).view(2, 1, kv_heads, 1)
    return (blocks[None, :, None] * (2 * kv_heads) + heads).reshape(-1)


def _tail_parts(
    tables: Sequence[list[int]], lens: Sequence[int], block_size: int, kv_heads: int, most: int
) -> Iterator[Part]:
    by_size: dict[int, list[int]] = {}
    for row, length in enumerate(lens):
        tail = 1 + (length - 1) % CHUNK
        size = next(size for size in _TAILS if size >= tail and size % block_size == 0)
        by_size.setdefault(size, []).append(row)
    for size, rows in by_size.items():
        limit = most * CHUNK // size
        for first in range(0, len(rows), limit):
            yield _tails(tables, lens, rows[first : first + limit], size, block_size, kv_heads)


def _tails(
    tables: Sequence[list[int]], lens: Sequence[int], rows: list[int], size: int, block_size: int, kv_heads: int
) -> Part:
    starts = [(lens[row] - 1) // CHUNK * CHUNK for row in rows]
    wide = size // block_size
    filled = []
    for row, start in zip(rows, starts, strict=True):
        own = tables[row][start // block_size : start // block_size + wide]
        filled.append(own + own[:1] * (wide - len(own)))
    tails = torch.tensor([lens[row] - start for row, start in zip(rows, starts, strict=True)])
    behind = torch.arange(size) >= tails[:, None]
    hidden = torch.zeros(behind.shape).masked_fill_(behind, float("-inf"))[:, None]
    targets = [start // CHUNK * len(tables) + row for row, start in zip(rows, starts, strict=True)]
    return Part(
        _source(torch.tensor(filled), kv_heads),
        torch.tensor(rows),
        torch.tensor(targets),
        len(rows),
        size,
        hidden,
        _unwritten(tails, size, block_size, kv_heads),
    )


def _unwritten(tails: torch.Tensor, size: int, block_size: int, kv_heads: int) -> torch.Tensor:
    """Returns the slots after a tail in its last block; all after it, if that block is also its padding."""
    places, ends = torch.arange(size), -(-tails // block_size) * block_size
    ends = ends.masked_fill(tails < block_size, size)
    empty = (places >= tails[:, None]) & (places < ends[:, None])
    spread = empty[None, :, None].expand(2, len(tails), kv_heads, size)
    return spread.reshape(-1).nonzero().squeeze(1)


def attend(out: torch.Tensor, query: torch.Tensor, kv: torch.Tensor, plan: ChunkPlan, scale: float) -> None:
    """Computes decode attention in float32; `out` and `query` are `[num_rows, H, D]`."""
    scaled = query.float() * scale
    num_rows, heads, head_dim = query.shape
    places = plan.num_places
    if places == 1:
        for part in plan.parts:
            out[part.readers] = _attend_part(scaled, kv, part)[0].to(out.dtype)
        return
    states = scaled.new_zeros((places * num_rows, heads, head_dim))
    sums = scaled.new_full((places * num_rows, heads), float("-inf"))
    for part in plan.parts:
        states[part.targets], sums[part.targets] = _attend_part(scaled, kv, part)
    shares = sums.view(places, num_rows, heads, 1).softmax(dim=0)
    states = states.view(places, *query.shape).mul_(shares)
    merged = states[0]
    for state in states[1:]:  # in their order: a longer row only adds zeros after a shorter one's states
        merged += state
    out.copy_(merged)


def _attend_part(query: torch.Tensor, kv: torch.Tensor, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the attention of each reader over its chunk, `[chunks * readers, H, D]`, and the log-sum-exp of its
    scores."""
    kv_heads, head_dim = kv.shape[2], kv.shape[4]
    chunks, groups = part.num_chunks, query.shape[1] // kv_heads
    each = len(part.readers) // chunks
    rows = kv.view(-1, kv.shape[3] * head_dim)
    gathered = rows.index_select(0, part.source).float()
    if part.unwritten is not None:
        gathered.view(-1, head_dim).index_fill_(0, part.unwritten, 0.0)
    keys, values = gathered.view(2, chunks * kv_heads, part.length, head_dim)
    asking = query.index_select(0, part.readers).view(chunks, each, kv_heads, groups, head_dim)
    asking = asking.transpose(1, 2).reshape(chunks * kv_heads, each * groups, head_dim)
    number = asking.shape[1]
    if number < _MIN_QUERIES - 1:
        asking = torch.nn.functional.pad(asking, (0, 0, 0, _MIN_QUERIES - number))
    scores = torch.bmm(asking, keys.transpose(1, 2))
    if part.hidden is not None:
        scores.view(chunks, -1, part.length).add_(part.hidden)
    weights = scores.softmax(dim=-1)
    state = torch.bmm(weights, values)[:, :number]
    # The largest weight is exp(largest score - log-sum-exp), and never small.
    sums = (scores.amax(dim=-1) - weights.amax(dim=-1).log())[:, :number]

    def by_reader(x: torch.Tensor) -> torch.Tensor:
        split = x.reshape(chunks, kv_heads, each, groups, -1).transpose(1, 2)
        return split.reshape(chunks * each, kv_heads * groups, -1)

    return by_reader(state), by_reader(sums).squeeze(-1)
