"""Low-rank additions with an adapter chosen for each token, in two launches: shrink, then expand.

It knows stacked adapters and rows grouped by adapter. One launch was considered and rejected: every block of output
columns would compute the whole shrink again (at 4,096 features and 64 blocks: 64 times, 32 loop steps before the first
output), or blocks would wait for one another. Shrink is split along in_features to fill the GPU, and expand adds the
parts in a fixed order while it loads them, so the second launch is also the second pass.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.reference.group_rows import RowGroups
from kernels.reference.lora import MAX_SPLITS, TILE, workspace_size
from kernels.triton.device import capability as capability_of
from kernels.triton.device import interpreting
from kernels.triton.specimen import Budget, Specimen

_MIN_SPLIT = 256


@dataclass(frozen=True)
class Config:
    block_r: int
    block_n: int
    block_k: int
    splits: int
    num_stages: int

    @property
    def tile(self) -> tuple[int, ...]:
        """Returns the values that the compiled code depends on."""
        return (self.block_r, self.block_n, self.block_k, self.num_stages)


def select(capability: int, rank: int, in_features: int, column_step: int, itemsize: int) -> Config:
    """Chooses the configuration. `column_step` is a power of two that divides the end of every part, so that a block
    has one part."""
    block_r = 16 if rank <= 16 else 64
    splits = 1
    while splits < MAX_SPLITS and in_features >= 2 * splits * _MIN_SPLIT:
        splits *= 2
    if itemsize > 2:
        return Config(block_r, min(64, column_step), 64, splits, 3)
    return Config(block_r, min(64, column_step), 128, splits, 4 if capability >= 90 else 3)


@triton.jit(do_not_specialize=["num_tokens"])
def _shrink(
    inner,
    x,
    weight,
    rows,
    tiles,
    num_tokens,
    in_features,
    split_size,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Computes `inner` `[splits, num_tokens, parts, rank]`: the rows of one tile, one part, one split."""
    adapter = tl.load(tiles + tl.program_id(0))
    if adapter < 0:
        return
    part = tl.program_id(1)
    split = tl.program_id(2)
    row = tl.load(rows + tl.program_id(0) * TILE + tl.arange(0, TILE))
    alive = (row >= 0)[:, None]
    row = tl.where(row >= 0, row, 0)
    r = tl.arange(0, BLOCK_R)
    k = tl.arange(0, BLOCK_K)
    start_of = weight + ((adapter * PARTS + part) * RANK + r).to(tl.int64)[:, None] * in_features
    token_of = x + row.to(tl.int64)[:, None] * in_features
    acc = tl.zeros((TILE, BLOCK_R), tl.float32)
    end = tl.minimum((split + 1) * split_size, in_features)
    for start in range(split * split_size, end, BLOCK_K):
        there = (start + k < in_features)[None, :]
        left = tl.load(token_of + (start + k)[None, :], mask=alive & there, other=0.0)
        tile = tl.load(start_of + (start + k)[None, :], mask=(r < RANK)[:, None] & there, other=0.0)
        if UPCAST:
            left = left.to(tl.float32)
            tile = tile.to(tl.float32)
        acc = tl.dot(left, tile.T, acc, input_precision="ieee")
    place = ((split * num_tokens + row[:, None]) * PARTS + part) * RANK + r[None, :]
    tl.store(inner + place, acc, mask=alive & (r < RANK)[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _expand(
    out,
    inner,
    weight,
    rows,
    tiles,
    num_tokens,
    out_features,
    first_end,
    second_end,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr,
):
    adapter = tl.load(tiles + tl.program_id(0))
    if adapter < 0:
        return
    row = tl.load(rows + tl.program_id(0) * TILE + tl.arange(0, TILE))
    alive = (row >= 0)[:, None]
    row = tl.where(row >= 0, row, 0)
    r = tl.arange(0, BLOCK_R)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < out_features
    part = 0
    if PARTS > 1:
        part += (tl.program_id(1) * BLOCK_N >= first_end).to(tl.int32)
    if PARTS > 2:
        part += (tl.program_id(1) * BLOCK_N >= second_end).to(tl.int32)
    total = tl.zeros((TILE, BLOCK_R), tl.float32)
    for split in tl.static_range(SPLITS):
        place = ((split * num_tokens + row[:, None]) * PARTS + part) * RANK + r[None, :]
        total += tl.load(inner + place, mask=alive & (r < RANK)[None, :], other=0.0)
    start_of = (adapter.to(tl.int64) * out_features + column)[:, None] * RANK
    tile = tl.load(weight + start_of + r[None, :], mask=inside[:, None] & (r < RANK)[None, :], other=0.0)
    left = total
    if UPCAST:
        tile = tile.to(tl.float32)
    else:
        left = total.to(tile.dtype)
    added = tl.dot(left, tile.T, input_precision="ieee")
    place = row.to(tl.int64)[:, None] * out_features + column[None, :]
    mask = alive & inside[None, :]
    before = tl.load(out + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, (before + added).to(out.dtype.element_ty), mask=mask)


def lora(
    out: torch.Tensor,
    x: torch.Tensor,
    shrink: torch.Tensor,
    expand: torch.Tensor,
    groups: RowGroups,
    part_ends: tuple[int, ...],
    workspace: torch.Tensor | None = None,
) -> None:
    """Computes the same as its twin in `kernels.reference.lora`."""
    num_tokens, in_features = x.shape
    _, parts, rank, _ = shrink.shape
    out_features = out.shape[1]
    config = _config(x.device, rank, in_features, _step(part_ends), x.itemsize)
    if workspace is None:
        size = workspace_size(num_tokens, parts, rank)
        workspace = torch.empty(size, dtype=torch.float32, device=x.device)
    tiles = len(groups.tiles)
    sizes = {"PARTS": parts, "RANK": rank, "TILE": TILE, "BLOCK_R": config.block_r}
    steps = triton.cdiv(in_features, config.block_k * config.splits)
    _shrink[(tiles, parts, config.splits)](
        workspace,
        x,
        shrink,
        groups.rows,
        groups.tiles,
        num_tokens,
        in_features,
        steps * config.block_k,
        **sizes,
        BLOCK_K=config.block_k,
        UPCAST=interpreting(),
        num_warps=4,
        num_stages=config.num_stages,
    )
    _expand[(tiles, triton.cdiv(out_features, config.block_n))](
        out,
        workspace,
        expand,
        groups.rows,
        groups.tiles,
        num_tokens,
        out_features,
        part_ends[0],
        part_ends[min(1, parts - 1)],
        SPLITS=config.splits,
        **sizes,
        BLOCK_N=config.block_n,
        UPCAST=interpreting(),
        num_warps=4,
    )


@functools.lru_cache(maxsize=256)
def _step(part_ends: tuple[int, ...]) -> int:
    """Returns the largest power of two, at most 64, that divides the ends of all parts but the last."""
    inner = [end & -end for end in part_ends[:-1]]
    return min([64, *inner])


@functools.lru_cache(maxsize=256)
def _config(device: torch.device, *shape: Any) -> Config:
    return select(capability_of(device), *shape)


def specimens(capability: int) -> Iterator[Specimen]:
    dtype, wide, number = torch.bfloat16, torch.float32, torch.int32
    for rank in (16, 64):
        config = select(capability, rank, 4096, 64, 2)
        sizes = {"PARTS": 3, "RANK": rank, "TILE": TILE, "BLOCK_R": config.block_r}
        stage_bytes = config.block_r * config.block_k * 2
        yield Specimen(
            f"lora shrink, rank {rank}",
            _shrink,
            (wide, dtype, dtype, number, number, 32, 4096, 512),
            {**sizes, "BLOCK_K": config.block_k, "UPCAST": False},
            Budget(
                registers=128, min_shared=(config.num_stages - 1) * stage_bytes, async_copies=True, matrix_unit="mma"
            ),
            num_stages=config.num_stages,
        )
        yield Specimen(
            f"lora expand, rank {rank}",
            _expand,
            (dtype, wide, dtype, number, number, 32, 6144, 4096, 5120),
            {**sizes, "SPLITS": config.splits, "BLOCK_N": config.block_n, "UPCAST": False},
            Budget(registers=168, matrix_unit="mma"),
        )
