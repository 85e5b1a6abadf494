"""Ragged chunks over KV in random blocks of a layer that is NaN elsewhere, and what attention over them is in float64."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from paged import quantized

from kernels.arguments.batch import PagedBatch


class Chunks:
    """Row i has `query_lens[i]` tokens behind `context_lens[i]` cached ones; context -query_len: a padding row."""

    def __init__(
        self,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        kv_heads: int = 1,
        group: int = 2,
        head_dim: int = 32,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        self._random = torch.Generator().manual_seed(seed)
        lens = [q + c for q, c in zip(query_lens, context_lens, strict=True)]
        tables = _tables(lens, block_size, seed)
        num_blocks = 2 + sum(map(len, tables))
        wide = self._normal(num_blocks, 2, kv_heads, block_size, head_dim)
        self.kv_scales: torch.Tensor | None = None
        if kv_dtype is None:
            self.kv = wide.to(dtype)
            self._wide = self.kv.double()
        else:
            self._wide, self.kv, self.kv_scales = quantized(wide, kv_dtype)
        _poison(self.kv if self.kv_scales is None else self.kv_scales[..., None], tables, lens)
        self.query = self._normal(sum(query_lens), kv_heads * group, head_dim).to(dtype)
        ids = [torch.tensor(table, dtype=torch.int64) for table in tables]
        self.batch = PagedBatch(list(query_lens), list(context_lens), ids, block_size)

    def expected(
        self,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        tree: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Row by row: scores of all keys, and which of them a token sees."""
        out = torch.zeros(self.query.shape, dtype=torch.float64)
        group = self.query.shape[1] // self.kv.shape[2]
        for row, start in enumerate(self.batch.starts[:-1]):
            context, length = self.batch.context_lens[row], self.batch.query_lens[row]
            if context < 0 or length == 0:
                continue
            blocks = self._wide[self.batch.block_tables[row]].permute(1, 2, 0, 3, 4).flatten(2, 3)
            keys, values = blocks[:, :, : context + length].repeat_interleave(group, dim=1)
            query = self.query[start : start + length].double().transpose(0, 1)
            scores = query @ keys.transpose(1, 2) * scale
            if softcap:
                scores = torch.tanh(scores / softcap) * softcap
            seen = _seen(context, length, window, None if tree is None else tree[start:])
            scores = scores.masked_fill(~seen, float("-inf"))
            if sinks is not None:
                column = sinks.double()[:, None, None].expand(-1, length, 1)
                scores = torch.cat((scores, column), dim=2)
            weights = scores.softmax(-1)[:, :, : context + length]
            out[start : start + length] = (weights @ values).transpose(0, 1)
        return out

    def part(self, row: int, first: int, last: int) -> tuple[PagedBatch, torch.Tensor]:
        """Tokens first...last of a row's chunk as a chunk of its own, the earlier ones as its context."""
        start, context = self.batch.starts[row], self.batch.context_lens[row]
        table = self.batch.block_tables[row][: -(-(context + last) // self.batch.block_size)]
        batch = PagedBatch([last - first], [context + first], [table], self.batch.block_size)
        return batch, self.query[start + first : start + last]

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._random, dtype=torch.float64)


def _seen(context: int, length: int, window: int, tree: torch.Tensor | None) -> torch.Tensor:
    seen = torch.zeros(length, context + length, dtype=torch.bool)
    for token in range(length):
        end = context + token + 1
        seen[token, max(0, end - window) if window else 0 : end] = True
        if tree is not None:
            named = [(int(tree[token]) >> other) & 1 == 1 for other in range(length)]
            seen[token, context:] &= torch.tensor(named)
    return seen


def _tables(lens: Sequence[int], block_size: int, seed: int) -> list[list[int]]:
    counts = [-(-length // block_size) for length in lens]
    free = list(range(1, 1 + sum(counts)))
    random.Random(seed).shuffle(free)
    return [[free.pop() for _ in range(count)] for count in counts]


def _poison(kv: torch.Tensor, tables: list[list[int]], lens: Sequence[int]) -> None:
    """Every slot that no row may read, the null block's too."""
    block_size = kv.shape[3]
    used = torch.zeros(len(kv), block_size, dtype=torch.bool)
    for table, length in zip(tables, lens, strict=True):
        for index, block in enumerate(table):
            used[block, : length - index * block_size] = True
    kv.masked_fill_(~used[:, None, None, :, None], float("nan"))
