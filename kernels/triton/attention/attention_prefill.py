"""Attention of chunks over KV in blocks: prefill, chunked prefill, verification of proposals.

It knows ragged rows of queries whose own keys are already in blocks. It does not know sequences, layers or why a chunk
is as long as it is. The running softmax over tiles is that of FlashAttention-2 (arXiv 2307.08691).

The queries of a row times the G query heads of a KV head are its *lanes*, in the order token, head. A program processes
a tile of lanes over tiles of keys, so K and V are read once for all heads of a group. A row with at most SHORT_LANES
lanes (verification, the tail after a long cached prefix) would leave a GPU idle: its keys are split as in decode, and a
second kernel merges the splits. Whether a row is split, and where, depends on that row alone, and tiles of keys begin
at the same keys wherever a chunk begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
import triton
import triton.language as tl

from kernels.arguments.batch import PagedBatch, RowTensors
from kernels.arguments.splits import DecodeWorkspace, most_splits
from kernels.triton.attention.attention_tiles import (
    LOG2_E,
    NOTHING,
    Tiling,
    budget,
    constants,
    refuse_kv,
    score_factors,
    specimen_name,
    split_size_of,
)
from kernels.triton.attention.prefill_tile import (
    SHORT,
    SHORT_LANES,
    attend,
    blocks_of,
    first_key,
    merge,
    partial_slot,
    row_of,
)
from kernels.triton.device import capability, interpreting
from kernels.triton.specimen import Budget, Specimen

_MERGED = 16
"""Number of splits that `merge` sums at once. It is fixed, so that the order of a row's sum is fixed."""


@triton.jit(do_not_specialize=["window", "num_rows", "table_stride", "num_splits", "num_lanes"])
def _prefill(
    out,
    partial_sums,
    partial_stats,
    query,
    kv,
    scales,
    block_table,
    seq_lens,
    query_starts,
    sinks,
    tree,
    factor,
    cap,
    window,
    num_rows,
    table_stride,
    num_splits,
    num_lanes,
    out_token_stride,
    out_head_stride,
    query_token_stride,
    query_head_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    QUANTIZED: tl.constexpr,
    SHORT_TILES: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Computes one tile of lanes of one KV head. SHORT_TILES 0: of a row that is not short, over all its keys. Else of
    a short row, which has so many tiles, over one split of its keys, into the partial sums if there are any."""
    kv_head, split = tl.program_id(1), tl.program_id(2)
    if SHORT_TILES:
        row = tl.program_id(0) // SHORT_TILES
        start = tl.load(query_starts + row)
        lane = tl.program_id(0) % SHORT_TILES * ROWS
    else:  # the longest first
        tile = tl.num_programs(0) - 1 - tl.program_id(0)
        row = row_of(query_starts, num_rows, tile, GROUP, ROWS)
        start = tl.load(query_starts + row)
        lane = (tile - row - start * GROUP // ROWS) * ROWS
    lanes = (tl.load(query_starts + row + 1) - start) * GROUP
    other_way = lanes > SHORT if SHORT_TILES else lanes <= SHORT
    if other_way | (lane >= lanes):
        return

    # A padding row has length 0: its positions are negative, it sees nothing and gets zeros.
    seq_len = tl.load(seq_lens + row)
    context = seq_len - lanes // GROUP
    oldest = context + lane // GROUP
    newest = context + (tl.minimum(lane + ROWS, lanes) - 1) // GROUP
    first, last = first_key(oldest, window, TOKENS, HAS_WINDOW), tl.maximum(newest + 1, 0)
    if SHORT_TILES:
        row_first = first_key(context, window, TOKENS, HAS_WINDOW)
        size = split_size_of(seq_len - row_first)
        if split * size >= tl.maximum(seq_len - row_first, 1):
            return
        first = tl.maximum(first, row_first + split * size)
        last = tl.minimum(last, row_first + split * size + size)

    # Places are counted from the tile's first token, so that they fit into 32 bits.
    token = start + lane // GROUP
    ahead = lane % GROUP + tl.arange(0, ROWS)
    head = kv_head * GROUP + ahead % GROUP
    filled = lane + tl.arange(0, ROWS) < lanes
    dim = tl.arange(0, DIM)
    inside = filled[:, None] & (dim < HEAD_DIM)[None, :]
    place = ahead // GROUP * query_token_stride + head * query_head_stride
    tokens = query + token.to(tl.int64) * query_token_stride
    packed = tl.load(tokens + place[:, None] + dim[None, :], mask=inside, other=0.0)
    if UPCAST:
        packed = packed.to(tl.float32)
    sums = tl.zeros([ROWS, DIM], tl.float32)
    peak = tl.full([ROWS], NOTHING, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sinks is not None:  # a learned logit that takes weight and gives no value
        sink = tl.load(sinks + head, mask=filled, other=0.0).to(tl.float32) * LOG2_E
        peak = tl.where(split == 0, sink, peak)
        total = tl.where(split == 0, 1.0, total)
    nodes = None
    if tree is not None:
        nodes = tl.load(tree + token + ahead // GROUP, mask=filled, other=0)

    # Behind `first` the window hides keys from some lanes; from `whole` on all lanes see all keys; from `ragged` on
    # keys are later than some lanes.
    whole = first
    if HAS_WINDOW:
        whole = tl.cdiv(tl.maximum(newest + 1 - window, 0), TOKENS) * TOKENS
        whole = tl.minimum(tl.maximum(whole, first), last)
    ragged = tl.maximum(oldest + 1 if tree is None else context, 0) // TOKENS * TOKENS
    ragged = tl.maximum(tl.minimum(ragged, last), whole)
    position = oldest + ahead // GROUP
    table = block_table + row.to(tl.int64) * table_stride
    blocks = blocks_of(table, first, last, TOKENS, BLOCK_SIZE)
    edges = (first, whole, ragged, last)
    for run in tl.static_range(0 if HAS_WINDOW else 1, 3):
        sums, peak, total, blocks = attend(
            sums,
            peak,
            total,
            blocks,
            packed,
            position,
            nodes,
            context,
            kv,
            scales,
            table,
            edges[run],
            edges[run + 1],
            last,
            kv_head,
            factor,
            cap,
            window,
            KV_HEADS,
            BLOCK_SIZE,
            HEAD_DIM,
            DIM,
            TOKENS,
            HAS_WINDOW,
            HAS_CAP,
            QUANTIZED,
            run != 1,
        )

    if partial_sums is not None:
        slot = partial_slot(row, kv_head, split, lane, num_splits, num_lanes, KV_HEADS)
        slot += tl.arange(0, ROWS)
        tl.store(partial_sums + slot[:, None] * HEAD_DIM + dim[None, :], sums, mask=inside)
        tl.store(partial_stats + slot * 2, peak, mask=filled)
        tl.store(partial_stats + slot * 2 + 1, total, mask=filled)
    else:
        result = sums / tl.where(total > 0.0, total, 1.0)[:, None]
        place = ahead // GROUP * out_token_stride + head * out_head_stride
        tokens = out + token.to(tl.int64) * out_token_stride
        place = tokens + place[:, None] + dim[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask=inside)


@lru_cache
def select(cap: int, head_dim: int, query: torch.dtype, kv: torch.dtype, short: bool) -> Tiling:
    """Chooses the tiling for rows with at most SHORT_LANES lanes, or for longer ones. Raises ValueError for a device
    that cannot read this KV.

    Long rows take 128 lanes, because 64 need twice the bytes of K and V per product: at half the rate of an H200's
    tensor cores 6 TB/s, which its last-level cache hardly reaches (derived). With 8 warps of more than 128 registers
    one program fits on a multiprocessor, so a tile has fewer keys only if registers would spill otherwise."""
    refuse_kv(cap, kv)
    wide, narrow, is_8_bit = head_dim > 128, head_dim <= 64, kv.itemsize == 1
    if query.itemsize == 4:  # no tensor cores: full precision multiplies a tile out of registers
        return Tiling(16, 16, 4, 2) if wide else Tiling(16, 32, 8, 2)
    if short:
        if is_8_bit:
            return Tiling(16, 32, 8 if wide else 4, 4)
        return Tiling(16, 32 if wide else 64, 4, 3)
    if wide:
        return Tiling(64, 16 if is_8_bit else 32, 8, 3)
    if is_8_bit:
        return Tiling(64 if cap < 90 else 128, 32, 8, 3)
    return Tiling(128, 64 if cap >= 90 or narrow else 32, 8, 3)


def attention_prefill(
    out: torch.Tensor,
    query: torch.Tensor,
    kv: torch.Tensor,
    batch: PagedBatch,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
    tree: torch.Tensor | None = None,
) -> None:
    """Computes the same as its twin in `kernels.reference.attention`. A batch with short rows uses its workspace, if it
    has one."""
    rows, kv_heads = batch.tensors, kv.shape[2]
    num_rows, group = len(rows.seq_lens), query.shape[1] // kv_heads
    lanes = rows.max_query_len * group
    if lanes == 0:
        return
    cap = capability(query.device)
    tensors = (query, kv, kv_scales, rows.block_table, rows.seq_lens, rows.query_starts)
    numbers = (*score_factors(scale, softcap), window, num_rows, rows.block_table.stride(0))
    given = (*tensors, sinks, tree, *numbers)
    strides = (*out.stride()[:2], *query.stride()[:2])
    flags = (group, window > 0, softcap != 0.0, kv_scales is not None)
    if lanes > SHORT_LANES:
        tiling = select(cap, query.shape[2], query.dtype, kv.dtype, False)
        tiles = len(query) * group // tiling.rows + num_rows
        _prefill[(tiles, kv_heads)](
            out,
            None,
            None,
            *given,
            1,
            1,
            *strides,
            **_constants(tiling, kv.shape, *flags),
            SHORT_TILES=0,
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )
    if batch.given is None and min(batch.query_lens) * group > SHORT_LANES:
        return

    tiling = select(cap, query.shape[2], query.dtype, kv.dtype, True)
    lanes, splits = min(lanes, SHORT_LANES), _splits(rows, window, tiling)
    space = _workspace(batch, out, kv_heads * lanes, splits)
    tiles = -(-lanes // tiling.rows)
    _prefill[(num_rows * tiles, kv_heads, splits)](
        out,
        space and space.sums,
        space and space.stats,
        *given,
        splits,
        lanes,
        *strides,
        **_constants(tiling, kv.shape, *flags),
        SHORT_TILES=tiles,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    if space is not None:
        merge[(num_rows * lanes, kv_heads)](
            out,
            space.sums,
            space.stats,
            rows.seq_lens,
            rows.query_starts,
            window,
            splits,
            lanes,
            *strides[:2],
            **_merge_constants(tiling, kv.shape, *flags),
        )


def _splits(rows: RowTensors, window: int, tiling: Tiling) -> int:
    """Returns the most splits that a short row of the batch can have."""
    longest = rows.max_seq_len
    if window:  # a row looks at its window, its own tokens, and what rounding down to a tile adds
        longest = min(longest, window + SHORT_LANES + tiling.tokens)
    return most_splits(longest)


def _workspace(batch: PagedBatch, out: torch.Tensor, num_places: int, splits: int) -> DecodeWorkspace | None:
    """Returns the workspace of partial sums, or None if there is nothing to merge."""
    if splits == 1:
        return None
    shape = (len(batch.tensors.seq_lens), num_places, out.shape[2], splits)
    if batch.workspace is None:
        return DecodeWorkspace.of(*shape, out.device)
    assert batch.workspace.holds(*shape), shape
    return batch.workspace


def _constants(
    tiling: Tiling, kv_shape: torch.Size, group: int, has_window: bool, has_cap: bool, quantized: bool
) -> dict[str, Any]:
    common = constants(tiling, kv_shape, group, has_cap, quantized)
    return common | {"HAS_WINDOW": has_window, "UPCAST": interpreting()}


def _merge_constants(tiling: Tiling, kv_shape: torch.Size, *flags: Any) -> dict[str, Any]:
    names = ("KV_HEADS", "GROUP", "HEAD_DIM", "DIM", "TOKENS", "HAS_WINDOW")
    common = _constants(tiling, kv_shape, *flags)
    return {name: common[name] for name in names} | {"MERGED": _MERGED}


@dataclass(frozen=True)
class _Shape:
    """A configuration that is compiled ahead, with eight KV heads."""

    registers: tuple[int, int]
    """Register budgets on sm_80 and on sm_90."""
    head_dim: int
    group: int
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv: torch.dtype = torch.bfloat16
    short: bool = False
    window_and_cap: bool = False
    sinks_and_tree: bool = False


_INT8, _HALF, _FULL = torch.int8, torch.float16, torch.float32
_SHAPES = (
    _Shape((208, 208), 128, 4),
    _Shape((208, 232), 128, 8, 64, window_and_cap=True),
    _Shape((192, 128), 64, 7),
    _Shape((208, 208), 80, 1),
    _Shape((208, 208), 96, 1, 32, _HALF, _HALF, sinks_and_tree=True),
    _Shape((255, 200), 256, 2, window_and_cap=True),
    _Shape((240, 208), 128, 4, kv=_INT8, window_and_cap=True),
    _Shape((255, 232), 256, 2, kv=_INT8),
    _Shape((255, 200), 128, 4, kv=torch.float8_e4m3fn),
    _Shape((80, 80), 128, 4, 16, _FULL, _FULL),
    _Shape((176, 152), 128, 4, short=True),
    _Shape((176, 184), 256, 2, short=True, window_and_cap=True),
    _Shape((176, 176), 128, 4, kv=_INT8, short=True),
    _Shape((216, 216), 256, 2, kv=_INT8, short=True, window_and_cap=True),
    _Shape((160, 160), 256, 4, 16, _FULL, _FULL, short=True),
)
"""Budgets are a little above what Triton 3.6.0 and 3.7.1 use. Where a budget is 128 registers (head size 64), two
programs fit on a multiprocessor."""


def specimens(capability: int) -> Iterator[Specimen]:
    for shape in _SHAPES:
        if shape.kv != torch.float8_e4m3fn or capability >= 89:
            yield _specimen(capability, shape)
    tiling = select(capability, 128, torch.bfloat16, torch.bfloat16, True)
    tensors = (torch.bfloat16, torch.float32, torch.float32, torch.int32, torch.int32)
    flags = (4, False, False, False)
    yield Specimen(
        "prefill merge 128 x 4",
        merge,
        (*tensors, 0, 16, 32, 4096, 128),
        _merge_constants(tiling, torch.Size((1, 2, 8, 16, 128)), *flags),
        Budget(registers=72),
    )


def _specimen(capability: int, shape: _Shape) -> Specimen:
    tiling = select(capability, shape.head_dim, shape.dtype, shape.kv, shape.short)
    kv_shape = torch.Size((1, 2, 8, shape.block_size, shape.head_dim))
    partial = torch.float32 if shape.short else None
    quantized = shape.kv.itemsize == 1
    scales = torch.float32 if quantized else None
    rare = (torch.float32, torch.int64) if shape.sinks_and_tree else (None, None)
    tensors = (shape.dtype, partial, partial, shape.dtype, shape.kv, scales, *(torch.int32,) * 3)
    stride = 8 * shape.group * shape.head_dim
    numbers = (0.1, 0.0, 0, 3, 300, 16, 32, stride, shape.head_dim, stride, shape.head_dim)
    flags = (shape.window_and_cap, shape.window_and_cap, quantized)
    unit: Literal["mma", "wgmma"] = "wgmma" if capability >= 90 and tiling.rows >= 64 else "mma"
    kinds = (shape.head_dim, shape.dtype, shape.kv)
    return Specimen(
        f"prefill {'short ' * shape.short}{specimen_name(shape.head_dim, shape.group, *kinds[1:])}"
        f"{' window cap' * shape.window_and_cap}{' sinks tree' * shape.sinks_and_tree}",
        _prefill,
        (*tensors, *rare, *numbers),
        _constants(tiling, kv_shape, shape.group, *flags) | {"SHORT_TILES": 2 if shape.short else 0, "UPCAST": False},
        budget(tiling, *kinds, unit, shape.registers[capability >= 90]),
        tiling.num_warps,
        tiling.num_stages,
    )
