"""Rows of a step → the tensors of one packed pass.

Knows plan.py's rows and the paged layout. Does not know the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.batch import PagedBatch, Slots
from workers.engine.model.hf import StepContext
from workers.engine.plan import Row


@dataclass(frozen=True, slots=True)
class PackedStep:
    token_ids: torch.Tensor
    positions: torch.Tensor
    context: StepContext
    order: list[int]
    """Index into the given rows of each packed row."""
    starts: list[int]
    """First packed token of each given row (not of each packed one)."""


def pack(
    rows: Sequence[Row], block_size: int, device: torch.device, min_tokens: int = 1
) -> PackedStep:
    """Rows with one token come first: their attention is another kernel's. Behind the rows the pass is filled up to
    `min_tokens` tokens that belong to nobody."""
    decode = [index for index, row in enumerate(rows) if len(row.tokens) == 1]
    prefill = [index for index, row in enumerate(rows) if len(row.tokens) != 1]
    order = decode + prefill
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0] * len(rows)
    for index in order:
        row = rows[index]
        starts[index] = len(token_ids)
        token_ids += row.tokens
        end = row.start + len(row.tokens)
        positions += range(row.start, end)
        table = row.block_table
        slots += [
            table[position // block_size] * block_size + position % block_size
            for position in range(row.start, end)
        ]
    padding = [0] * (min_tokens - len(token_ids))
    context = StepContext(
        Slots(torch.tensor(slots, device=device), block_size),
        _batch([rows[index] for index in decode], block_size, device),
        _batch([rows[index] for index in prefill], block_size, device),
    )
    return PackedStep(
        torch.tensor(token_ids + padding, device=device),
        torch.tensor(positions + padding, device=device),
        context,
        order,
        starts,
    )


def _batch(rows: Sequence[Row], block_size: int, device: torch.device) -> PagedBatch | None:
    if not rows:
        return None
    tables = []
    for row in rows:
        used = -(-(row.start + len(row.tokens)) // block_size)
        assert len(row.block_table) >= used, "a block table ends before its tokens"
        tables.append(torch.tensor(row.block_table[:used], dtype=torch.int64, device=device))
    return PagedBatch(
        [len(row.tokens) for row in rows], [row.start for row in rows], tables, block_size
    )
