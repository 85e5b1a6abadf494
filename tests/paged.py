"""Rows with KV in random blocks of a layer whose other slots are poisoned, and what attention over them is in float64."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from kernels.arguments.batch import PagedBatch
from kernels.arguments.shared import SharedGroups

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


class Paged:
    """One query per row. A length of 0 is a padding row. `prefixes`: (rows, shared blocks) of groups."""

    def __init__(
        self,
        lens: Sequence[int],
        kv_heads: int = 1,
        group: int = 2,
        head_dim: int = 32,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        prefixes: Sequence[tuple[list[int], int]] = (),
    ) -> None:
        self.lens, self.prefixes = list(lens), prefixes
        self._random = torch.Generator().manual_seed(sum(lens) + 7 * head_dim + group)
        tables = self._tables(block_size)
        num_blocks = 2 + max((max(table, default=0) for table in tables), default=0)
        wide = self._normal(num_blocks, 2, kv_heads, block_size, head_dim)
        self.kv_scales: torch.Tensor | None = None
        if kv_dtype is None:
            self.kv = wide.to(dtype)
            wide = self.kv.double()
        else:
            wide, self.kv, self.kv_scales = quantized(wide, kv_dtype)
        self._poison(tables, block_size)
        self.query = self._normal(len(lens), kv_heads * group, head_dim).to(dtype)
        self.batch = PagedBatch(
            [1] * len(lens),
            [length - 1 for length in lens],
            [torch.tensor(table, dtype=torch.int64) for table in tables],
            block_size,
        )
        self._wide, self._group = wide, group

    def strengthen(self, row: int, position: int, score: float) -> None:
        """Turns a key (of every KV head, not quantized) towards the row's first query: their product is `score`."""
        assert self.kv_scales is None
        size = self.batch.block_size
        block = int(self.batch.block_tables[row][position // size])
        query = self.query[row, 0].double()
        for kv in (self.kv, self._wide):
            kv[block, 0, :, position % size] = (query * score / query.square().sum()).to(kv.dtype)

    def groups(self) -> SharedGroups:
        return SharedGroups.of(self.batch, self.prefixes)

    def expected(
        self, scale: float, window: int = 0, softcap: float = 0.0, sinks: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Result and log-sum-exp, float64."""
        out = torch.zeros(self.query.shape, dtype=torch.float64)
        lse = torch.full(self.query.shape[:2], float("-inf"), dtype=torch.float64)
        for row, length in enumerate(self.lens):
            blocks = self._wide[self.batch.block_tables[row]].permute(1, 2, 0, 3, 4).flatten(2, 3)
            first = max(0, length - window) if window else 0
            keys, values = blocks[:, :, first:length].repeat_interleave(self._group, dim=1)
            scores = (keys @ self.query[row].double()[:, :, None]).squeeze(-1) * scale
            if softcap:
                scores = torch.tanh(scores / softcap) * softcap
            if sinks is not None:
                scores = torch.cat((scores, sinks.double()[:, None]), dim=1)
            if scores.shape[1]:
                weights = scores.softmax(-1)[:, : values.shape[1]]
                out[row] = (weights[:, None] @ values).squeeze(1)
                lse[row] = scores.logsumexp(-1)
        return out, lse

    def _tables(self, block_size: int) -> list[list[int]]:
        counts = [-(-length // block_size) for length in self.lens]
        free = list(range(1, 1 + sum(counts) + sum(count for _, count in self.prefixes)))
        random.Random(len(free)).shuffle(free)
        tables: list[list[int]] = [[] for _ in self.lens]
        for rows, count in self.prefixes:
            blocks = [free.pop() for _ in range(count)]
            for row in rows:
                tables[row] = list(blocks)
        for table, count in zip(tables, counts, strict=True):
            table += [free.pop() for _ in range(count - len(table))]
        return tables

    def _poison(self, tables: list[list[int]], block_size: int) -> None:
        """Makes NaN of what no row may read: KV, or the scales of KV that cannot be."""
        used = torch.zeros(len(self.kv), block_size, dtype=torch.bool)
        for table, length in zip(tables, self.lens, strict=True):
            for index, block in enumerate(table):
                used[block, : length - index * block_size] = True
        target = self.kv if self.kv_scales is None else self.kv_scales[..., None]
        target.masked_fill_(~used[:, None, None, :, None], float("nan"))

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._random, dtype=torch.float64)


def quantized(wide: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values that survive, numbers, scales: one scale per token and head."""
    scales = (wide.abs().amax(-1) / LARGEST[dtype]).float()
    numbers = wide / scales.double()[..., None]
    numbers = (numbers.round() if dtype == torch.int8 else numbers).to(dtype)
    return numbers.double() * scales.double()[..., None], numbers, scales
