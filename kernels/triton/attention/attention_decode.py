"""Attention of one query token per row over KV in blocks.

It knows rows, blocks and splits. A first kernel attends over one split of a row's keys per program and writes a partial
sum; a second one reduces a row's partial sums in a fixed order. Source: FlashDecoding (Dao and others, 2023) over the
blocks of PagedAttention (arXiv 2309.06180); the query heads of a KV head fill one tile, so K and V are read once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.arguments.batch import PagedBatch
from kernels.arguments.shared import SharedGroups
from kernels.arguments.splits import DecodeWorkspace, most_splits
from kernels.triton.attention.attention_tiles import (
    LOG2_E,
    NOTHING,
    ROWS,
    attend,
    budget,
    constants,
    score_factors,
    select,
    shared_splits_of,
    specimen_name,
    split_size_of,
)
from kernels.triton.device import capability, interpreting
from kernels.triton.specimen import Budget, Specimen

_LN_2 = tl.constexpr(0.6931471805599453)
_REDUCED = 16
"""Number of splits that the second kernel sums at once. It is fixed, so that the order of a row's sum is fixed."""


@triton.jit
def _own_keys(seq_lens, own_starts, row, window, SHARED: tl.constexpr):
    """Returns the first and end of the keys that a row attends over by itself, and how many it shares."""
    end = tl.load(seq_lens + row)
    first = tl.where(window > 0, tl.maximum(end - window, 0), 0)
    shared = 0
    if SHARED:
        shared = tl.load(own_starts + row)
        first = tl.maximum(first, shared)
    return first, end, shared


@triton.jit(do_not_specialize=["window", "table_stride", "num_splits"])
def _decode(
    partial_sums,
    partial_stats,
    query,
    kv,
    scales,
    block_table,
    seq_lens,
    own_starts,
    factor,
    cap,
    window,
    table_stride,
    num_splits,
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
    SHARED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    row, split = tl.program_id(0), tl.program_id(2)
    parts: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    kv_head = tl.program_id(1) // parts
    first, end, _ = _own_keys(seq_lens, own_starts, row, window, SHARED)
    size = split_size_of(end - first)
    begin = first + split * size
    if begin >= end:
        return
    group = tl.program_id(1) % parts * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    inside = (group < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    head_place = (kv_head * GROUP + group) * query_head_stride
    place = row.to(tl.int64) * query_row_stride + head_place[:, None] + dim[None, :]
    packed = tl.load(query + place, mask=inside, other=0.0)
    if UPCAST:
        packed = packed.to(tl.float32)
    sums, peak, total = attend(
        packed,
        kv,
        scales,
        block_table + row.to(tl.int64) * table_stride,
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
    first_slot = (row.to(tl.int64) * KV_HEADS + kv_head) * num_splits + split
    slot = first_slot * GROUP + group
    tl.store(partial_sums + slot[:, None] * HEAD_DIM + dim[None, :], sums, mask=inside)
    tl.store(partial_stats + slot * 2, peak, mask=group < GROUP)
    tl.store(partial_stats + slot * 2 + 1, total, mask=group < GROUP)


@triton.jit(do_not_specialize=["window", "num_splits", "first_shared_slot", "shared_splits", "order_lines"])
def _reduce(
    out,
    lse,
    partial_sums,
    partial_stats,
    seq_lens,
    own_starts,
    places,
    sinks,
    window,
    num_splits,
    first_shared_slot,
    shared_splits,
    order_lines,
    out_row_stride,
    out_head_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    REDUCED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    SHARED: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    first, end, shared = _own_keys(seq_lens, own_starts, row, window, SHARED)
    before = shared_splits_of(shared)
    used = before + tl.cdiv(end - first, split_size_of(end - first))
    dim = tl.arange(0, DIM)
    filled = dim < HEAD_DIM
    kv_head = head // GROUP
    first_slot = (row.to(tl.int64) * (HEADS // GROUP) + kv_head) * num_splits - before
    sums = tl.zeros([DIM], tl.float32)
    peak = tl.full([1], NOTHING, tl.float32)
    total = tl.zeros([1], tl.float32)
    for start in range(0, used, REDUCED):
        split = start + tl.arange(0, REDUCED)
        there = split < used
        slot = (first_slot + split) * GROUP + head % GROUP
        if SHARED:  # the sums over shared keys come first, and lie in another order
            line = tl.load(places + row) * GROUP + head % GROUP
            strip = (kv_head * shared_splits + split).to(tl.int64)
            slot = tl.where(split < before, first_shared_slot + strip * order_lines + line, slot)
        peaks = tl.load(partial_stats + slot * 2, mask=there, other=NOTHING)
        totals = tl.load(partial_stats + slot * 2 + 1, mask=there, other=0.0)
        inside = there[:, None] & filled[None, :]
        part = tl.load(partial_sums + slot[:, None] * HEAD_DIM + dim[None, :], mask=inside, other=0)
        new_peak = tl.maximum(peak, tl.max(peaks, 0))
        weights = tl.exp2(peaks - new_peak)
        fade = tl.exp2(peak - new_peak)
        sums = sums * fade + tl.sum(part * weights[:, None], 0)
        total = total * fade + tl.sum(totals * weights, 0)
        peak = new_peak
    if HAS_SINKS:  # a learned logit that takes weight and gives no value
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        new_peak = tl.maximum(peak, sink)
        fade = tl.exp2(peak - new_peak)
        sums *= fade
        total = total * fade + tl.exp2(sink - new_peak)
        peak = new_peak
    # A row without keys gets zeros: nothing was written to its partial sums.
    positive = tl.where(total > 0.0, total, 1.0)
    result = sums / positive
    place = row.to(tl.int64) * out_row_stride + head * out_head_stride + dim
    tl.store(out + place, result.to(out.dtype.element_ty), mask=filled)
    if HAS_LSE:
        known = (peak + tl.log2(positive)) * _LN_2
        known = tl.where(total > 0.0, known, float("-inf"))
        tl.store(lse + row * HEADS + head + tl.arange(0, 1), known)


def attention_decode(
    out: torch.Tensor,
    query: torch.Tensor,
    kv: torch.Tensor,
    batch: PagedBatch,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> None:
    """Computes the same as its twin in `kernels.reference.attention`."""
    longest = batch.tensors.max_seq_len
    num_splits = most_splits(min(longest, window) if window else longest)
    space = workspace_of(batch, query, num_splits)
    decode_own(space, query, kv, batch, scale, window, softcap, kv_scales, num_splits, None)
    reduce_splits(out, space, batch, window, sinks, lse, num_splits, kv.shape[2], None)


def workspace_of(batch: PagedBatch, query: torch.Tensor, num_splits: int) -> DecodeWorkspace:
    num_rows, num_heads, head_dim = query.shape
    if batch.workspace is None:
        return DecodeWorkspace.of(num_rows, num_heads, head_dim, num_splits, query.device)
    assert batch.workspace.holds(num_rows, num_heads, head_dim, num_splits), (query.shape, num_splits)
    return batch.workspace


def decode_own(
    space: DecodeWorkspace,
    query: torch.Tensor,
    kv: torch.Tensor,
    batch: PagedBatch,
    scale: float,
    window: int,
    softcap: float,
    kv_scales: torch.Tensor | None,
    num_splits: int,
    own_starts: torch.Tensor | None,
) -> None:
    """Computes the partial sums of each row over its own keys, of which there are at most `num_splits`."""
    rows = batch.tensors
    kv_heads = kv.shape[2]
    group = query.shape[1] // kv_heads
    cap = capability(query.device)
    tiling = select(cap, query.shape[2], query.dtype, kv.dtype)
    _decode[(len(query), kv_heads * triton.cdiv(group, ROWS), num_splits)](
        space.sums,
        space.stats,
        query,
        kv,
        kv_scales,
        rows.block_table,
        rows.seq_lens,
        own_starts,
        *score_factors(scale, softcap),
        window,
        rows.block_table.stride(0),
        num_splits,
        query.stride(0),
        query.stride(1),
        **constants(tiling, kv.shape, group, softcap != 0.0, kv_scales is not None),
        SHARED=own_starts is not None,
        UPCAST=interpreting(),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )


def reduce_splits(
    out: torch.Tensor,
    space: DecodeWorkspace,
    batch: PagedBatch,
    window: int,
    sinks: torch.Tensor | None,
    lse: torch.Tensor | None,
    num_splits: int,
    kv_heads: int,
    groups: SharedGroups | None,
) -> None:
    """Reduces the partial sums of each row, in the order of its keys, to its result."""
    num_rows, heads, head_dim = out.shape
    grouped = (0, 0) if groups is None else (groups.num_splits, len(groups.order))
    _reduce[(num_rows, heads)](
        out,
        lse,
        space.sums,
        space.stats,
        batch.tensors.seq_lens,
        None if groups is None else groups.own_starts,
        None if groups is None else groups.places,
        sinks,
        window,
        num_splits,
        num_rows * heads * num_splits,
        grouped[0],
        grouped[1] * (heads // kv_heads),
        out.stride(0),
        out.stride(1),
        HEADS=heads,
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        DIM=triton.next_power_of_2(head_dim),
        REDUCED=_REDUCED,
        HAS_SINKS=sinks is not None,
        HAS_LSE=lse is not None,
        SHARED=groups is not None,
    )


def specimens(capability: int) -> Iterator[Specimen]:
    for head_dim, group, block_size, dtype, kv, has_cap, shared in _SPECIMENS:
        if kv == torch.float8_e4m3fn and capability < 89:
            continue
        tiling = select(capability, head_dim, dtype, kv)
        registers = 160 if head_dim > 128 else 168 if tiling.num_warps == 2 else 128
        scales = torch.float32 if kv.itemsize == 1 else None
        pointers = (torch.float32, torch.float32, dtype, kv, scales, torch.int32, torch.int32)
        strides = (300, 16, 8 * group * head_dim, head_dim)
        shape = torch.Size((1, 2, 8, block_size, head_dim))
        yield Specimen(
            f"decode {specimen_name(head_dim, group, dtype, kv)}{' shared' * shared}",
            _decode,
            (*pointers, torch.int32 if shared else None, 0.1, 0.0, 0, *strides),
            constants(tiling, shape, group, has_cap, scales is not None) | {"SHARED": shared, "UPCAST": False},
            budget(tiling, head_dim, dtype, kv, "mma", registers),
            tiling.num_warps,
            tiling.num_stages,
        )
    for head_dim, dtype in ((128, torch.bfloat16), (256, torch.float32)):
        yield _reduce_specimen(head_dim, dtype)


def _reduce_specimen(head_dim: int, dtype: torch.dtype) -> Specimen:
    pointers = (dtype, *[torch.float32] * 3, *[torch.int32] * 3, dtype)
    sizes = {
        "HEADS": 32,
        "GROUP": 4,
        "HEAD_DIM": head_dim,
        "DIM": head_dim,
        "REDUCED": _REDUCED,
        "HAS_SINKS": True,
        "HAS_LSE": True,
        "SHARED": True,
    }
    arguments = (*pointers, 0, 16, 99, 16, 99, 32 * head_dim, head_dim)
    return Specimen(f"reduce {head_dim}", _reduce, arguments, sizes, Budget(registers=96))


_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_INT8, _FP8 = torch.int8, torch.float8_e4m3fn
_SPECIMENS = (
    (128, 4, 16, _BF16, _BF16, False, False),
    (128, 4, 16, _BF16, _BF16, False, True),
    (64, 7, 16, _BF16, _BF16, False, False),
    (80, 1, 64, _FP16, _FP16, True, False),
    (256, 2, 16, _BF16, _BF16, True, False),
    (128, 4, 16, _BF16, _INT8, False, False),
    (256, 8, 32, _BF16, _INT8, True, False),
    (128, 32, 16, _BF16, _FP8, True, False),
    (256, 4, 16, _FP32, _FP32, False, False),
)
"""Head size, group, block size, dtype of queries and of KV, whether there is a softcap, and whether there is a shared
prefix."""
