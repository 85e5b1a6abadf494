"""Attention of many rows over one prefix that they share, and of each row over its own keys.

It knows groups of rows. Tiles of a whole group's queries are processed over the shared blocks, so that those are read
once per tile and not once per row; the rest is `attention_decode`, and its second kernel reduces both kinds of partial
sums. Source: Hydragen (arXiv 2402.05099), RelayAttention (arXiv 2402.14808).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Literal

import torch
import triton
import triton.language as tl

from kernels.arguments.batch import PagedBatch
from kernels.arguments.shared import SharedGroups
from kernels.arguments.splits import SHARED_FACTOR, DecodeWorkspace, most_splits
from kernels.triton.attention.attention_decode import decode_own, reduce_splits, workspace_of
from kernels.triton.attention.attention_tiles import (
    ROWS,
    Tiling,
    attend,
    budget,
    constants,
    refuse_kv,
    score_factors,
    specimen_name,
    split_size_of,
)
from kernels.triton.device import capability, interpreting
from kernels.triton.specimen import Specimen

_FACTOR = tl.constexpr(SHARED_FACTOR)


@functools.cache
def select(cap: int, head_dim: int, query: torch.dtype, kv: torch.dtype) -> Tiling:
    """Chooses the tiling. Raises ValueError for a device that cannot read this KV."""
    refuse_kv(cap, kv)
    wide = triton.next_power_of_2(head_dim) > 128
    if query.itemsize == 4:
        return Tiling(ROWS, 16, 8, 2)
    if kv.itemsize == 1:
        return Tiling(64, 16 if wide else 32, 8, 4)
    if wide:
        return Tiling(64, 32, 8, 3)
    return Tiling(64, 64, 4 if cap >= 90 else 8, 3)  # 4 warps on sm_80 keep values in memory


@triton.jit(do_not_specialize=["group_tiles", "first_slot", "order_lines", "table_stride"])
def _attend_shared(
    partial_sums,
    partial_stats,
    query,
    kv,
    scales,
    block_table,
    shared_lens,
    order,
    starts,
    factor,
    cap,
    group_tiles,
    first_slot,
    order_lines,
    table_stride,
    query_row_stride,
    query_head_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    QUANTIZED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    shared = tl.program_id(0) // group_tiles
    kv_head, split = tl.program_id(1), tl.program_id(2)
    end = tl.load(shared_lens + shared)
    size = _FACTOR * split_size_of(end)
    begin = split * size
    first_row = tl.load(starts + shared)
    # A line of the tile is a query head of a row: all heads of this KV head of the first row, then of the next.
    line = tl.program_id(0) % group_tiles * ROWS + tl.arange(0, ROWS)
    num_lines = (tl.load(starts + shared + 1) - first_row) * GROUP
    if (begin >= end) | (tl.program_id(0) % group_tiles * ROWS >= num_lines):
        return
    dim = tl.arange(0, DIM)
    there = line < num_lines
    inside = there[:, None] & (dim < HEAD_DIM)[None, :]
    row = tl.load(order + first_row + line // GROUP, mask=there, other=0).to(tl.int64)
    head = kv_head * GROUP + line % GROUP
    place = (row * query_row_stride + head * query_head_stride)[:, None] + dim[None, :]
    packed = tl.load(query + place, mask=inside, other=0.0)
    if UPCAST:
        packed = packed.to(tl.float32)
    sums, peak, total = attend(
        packed,
        kv,
        scales,
        block_table + shared * table_stride,
        begin,
        tl.minimum(begin + size, end),
        kv_head,
        factor,
        cap,
        KV_HEADS,
        BLOCK_SIZE,
        HEAD_DIM,
        DIM,
        ROWS,
        TOKENS,
        HAS_CAP,
        QUANTIZED,
    )
    # In the order of the lines, not of the batch's rows: addresses that grow evenly need few registers.
    slot = first_slot + (kv_head * tl.num_programs(2) + split).to(tl.int64) * order_lines
    slot += first_row * GROUP + line
    tl.store(partial_sums + slot[:, None] * HEAD_DIM + dim[None, :], sums, mask=inside)
    tl.store(partial_stats + slot * 2, peak, mask=there)
    tl.store(partial_stats + slot * 2 + 1, total, mask=there)


def attention_shared(
    out: torch.Tensor,
    query: torch.Tensor,
    kv: torch.Tensor,
    batch: PagedBatch,
    groups: SharedGroups,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Computes the same as its twin in `kernels.reference.attention`."""
    own_splits = most_splits(groups.max_own_len)
    space = space_of(batch, query, groups)
    _shared_part(space, query, kv, groups, scale, softcap, kv_scales, own_splits)
    decode_own(space, query, kv, batch, scale, 0, softcap, kv_scales, own_splits, groups.own_starts)
    reduce_splits(out, space, batch, 0, sinks, None, own_splits, kv.shape[2], groups)


def space_of(batch: PagedBatch, query: torch.Tensor, groups: SharedGroups) -> DecodeWorkspace:
    """Returns memory for the parts of each row's own keys, and after them for those of shared keys."""
    return workspace_of(batch, query, most_splits(groups.max_own_len) + groups.num_splits)


def _shared_part(
    space: DecodeWorkspace,
    query: torch.Tensor,
    kv: torch.Tensor,
    groups: SharedGroups,
    scale: float,
    softcap: float,
    kv_scales: torch.Tensor | None,
    own_splits: int,
) -> None:
    num_rows, heads, head_dim = query.shape
    kv_heads = kv.shape[2]
    group = heads // kv_heads
    tiling = select(capability(query.device), head_dim, query.dtype, kv.dtype)
    group_tiles = triton.cdiv(groups.max_group_rows * group, tiling.rows)
    _attend_shared[(groups.num_groups * group_tiles, kv_heads, groups.num_splits)](
        space.sums,
        space.stats,
        query,
        kv,
        kv_scales,
        groups.block_table,
        groups.shared_lens,
        groups.order,
        groups.starts,
        *score_factors(scale, softcap),
        group_tiles,
        num_rows * heads * own_splits,
        len(groups.order) * group,
        groups.block_table.stride(0),
        query.stride(0),
        query.stride(1),
        **constants(tiling, kv.shape, group, softcap != 0.0, kv_scales is not None),
        UPCAST=interpreting(),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )


def specimens(capability: int) -> Iterator[Specimen]:
    for head_dim, group, dtype, kv in _SPECIMENS:
        if kv == torch.float8_e4m3fn and capability < 89:
            continue
        tiling = select(capability, head_dim, dtype, kv)
        unit: Literal["mma", "wgmma"] = "wgmma" if capability == 90 else "mma"
        scales = torch.float32 if kv.itemsize == 1 else None
        pointers = (torch.float32, torch.float32, dtype, kv, scales, *[torch.int32] * 4)
        arguments = (*pointers, 0.1, 0.0, 4, 99, 99, 300, 8 * group * head_dim, head_dim)
        yield Specimen(
            f"shared {specimen_name(head_dim, group, dtype, kv)}",
            _attend_shared,
            arguments,
            constants(tiling, torch.Size((1, 2, 8, 16, head_dim)), group, False, scales is not None)
            | {"UPCAST": False},
            budget(tiling, head_dim, dtype, kv, unit, 220),
            tiling.num_warps,
            tiling.num_stages,
        )


_BF16 = torch.bfloat16
_SPECIMENS = (
    (128, 4, _BF16, _BF16),
    (80, 7, _BF16, _BF16),
    (256, 2, _BF16, _BF16),
    (128, 4, _BF16, torch.int8),
    (128, 4, _BF16, torch.float8_e4m3fn),
    (256, 2, _BF16, torch.int8),
    (256, 2, torch.float32, torch.float32),
)
"""Head size, group, dtype of queries and of KV."""
