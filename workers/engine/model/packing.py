"""Packs the rows of a step into the tensors of one pass.

It knows plan.py's rows and the paged layout. It does not know the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.arguments.batch import PagedBatch, Slots
from workers.engine.model.attention_scores import MassProbe
from workers.engine.model.hf import StepContext, Trees
from workers.engine.values import token_tree
from workers.engine.values.layout import Tree
from workers.engine.values.plan import Row
from workers.engine.values.probe import AttentionMass


@dataclass(frozen=True, slots=True)
class PackedStep:
    token_ids: torch.Tensor
    positions: torch.Tensor
    context: StepContext
    order: list[int]
    """The index of each packed row among the given rows."""
    starts: list[int]
    """The index of the first packed token of each given row (not of each packed one)."""


def pack(rows: Sequence[Row], block_size: int, device: torch.device, min_tokens: int = 1) -> PackedStep:
    """Packs rows. Rows with one token come first, because another kernel computes their attention. Chunks follow, then
    trees. After the rows the pass is padded to `min_tokens` tokens that belong to no row."""
    decode = [index for index, row in enumerate(rows) if len(row.tokens) == 1]
    trees = [index for index, row in enumerate(rows) if isinstance(row.layout, Tree)]
    prefill = [i for i, row in enumerate(rows) if len(row.tokens) != 1 and not isinstance(row.layout, Tree)]
    order = decode + prefill + trees
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0] * len(rows)
    for index in order:
        row = rows[index]
        starts[index] = len(token_ids)
        token_ids += row.tokens
        if isinstance(row.layout, Tree):
            positions += token_tree.positions(row.start, row.layout.parents)
        else:
            positions += range(row.start, row.start + len(row.tokens))
        table, first = row.block_table, row.kv_start
        slots += [
            table[place // block_size] * block_size + place % block_size
            for place in range(first, first + len(row.tokens))
        ]
    padding = [0] * (min_tokens - len(token_ids))
    context = StepContext(
        Slots(torch.tensor(slots, device=device), block_size),
        _batch([rows[index] for index in decode], block_size, device),
        _batch([rows[index] for index in prefill], block_size, device),
        _trees([rows[index] for index in trees], block_size, device),
    )
    if any(isinstance(row.probe, AttentionMass) for row in rows):
        context.mass = MassProbe(rows, starts, block_size, device)
    return PackedStep(
        torch.tensor(token_ids + padding, device=device),
        torch.tensor(positions + padding, device=device),
        context,
        order,
        starts,
    )


def _trees(rows: Sequence[Row], block_size: int, device: torch.device) -> Trees | None:
    batch = _batch(rows, block_size, device)
    if batch is None:
        return None
    views = [v for row in rows if isinstance(row.layout, Tree) for v in token_tree.views(row.layout.parents)]
    return Trees(batch, torch.tensor(views, dtype=torch.int64, device=device))


def _batch(rows: Sequence[Row], block_size: int, device: torch.device) -> PagedBatch | None:
    if not rows:
        return None
    tables = []
    for row in rows:
        used = -(-(row.kv_start + len(row.tokens)) // block_size)
        assert len(row.block_table) >= used, "a block table ends before its tokens"
        tables.append(torch.tensor(row.block_table[:used], dtype=torch.int64, device=device))
    return PagedBatch([len(row.tokens) for row in rows], [row.kv_start for row in rows], tables, block_size)
