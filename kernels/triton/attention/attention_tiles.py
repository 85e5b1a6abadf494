"""The common parts of the attention kernels over blocks: tiles, the loop over the keys of one split, the tilings.

It knows queries of one KV head and the blocks of one row or group. It does not know which queries those are.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
import triton.language as tl

from kernels.arguments.splits import LONGEST, SHARED_FACTOR, STEPS
from kernels.triton.specimen import Budget

LOG2_E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(-1e38)
"""The largest score if there is none: it is finite, so that it can be subtracted from itself."""
_UP_TO_0, _SIZE_0 = map(tl.constexpr, STEPS[0])
_UP_TO_1, _SIZE_1 = map(tl.constexpr, STEPS[1])
_UP_TO_2, _SIZE_2 = map(tl.constexpr, STEPS[2])
_SIZE_3 = tl.constexpr(LONGEST)
_SHARED_FACTOR = tl.constexpr(SHARED_FACTOR)
ROWS = 16
"""The smallest number of rows that tensor cores multiply at once."""


@dataclass(frozen=True)
class Tiling:
    """The tiles in which one program of an attention kernel processes keys."""

    rows: int
    """Queries times heads in a tile, a multiple of 16."""
    tokens: int
    """Keys in a tile."""
    num_warps: int
    num_stages: int


@functools.cache
def select(cap: int, head_dim: int, query: torch.dtype, kv: torch.dtype) -> Tiling:
    """Chooses the tiling. Raises ValueError for a device that cannot read this KV. A tile of K and V is 32 KB in 16
    bits, and half of it in 8: two or three of them in flight in each of three programs keep a multiprocessor's memory
    busy. On capability 90, bfloat16 at heads of 64 and 128 and int8 at 128 have the best of a sweep
    (`benchmarks/results/2026-11-26-h200.json`), and heads up to 128 take their numbers."""
    refuse_kv(cap, kv)
    dim = triton.next_power_of_2(head_dim)
    if query.itemsize == 4:  # no tensor cores: full precision multiplies a tile out of registers
        return Tiling(ROWS, 16, 8, 2)
    if dim > 128:
        return Tiling(ROWS, 32, 8, 4 if kv.itemsize == 1 else 3)
    if kv == torch.int8 and cap == 90:
        return Tiling(ROWS, 64, 2, 3)
    if kv.itemsize == 1:  # each number is cast: more warps, one stage more
        return Tiling(ROWS, 64, 8, 4)
    return Tiling(ROWS, 64, 4, 3) if dim == 128 or cap == 90 else Tiling(ROWS, 128, 8, 3)


def refuse_kv(cap: int, kv: torch.dtype) -> None:
    if kv == torch.float8_e4m3fn and cap < 89:
        raise ValueError(f"A device of capability {cap} has no float8: its KV can be int8.")


@triton.jit
def split_size_of(num_keys):
    size = tl.where(num_keys <= _UP_TO_2, _SIZE_2, _SIZE_3)
    size = tl.where(num_keys <= _UP_TO_1, _SIZE_1, size)
    return tl.where(num_keys <= _UP_TO_0, _SIZE_0, size)


@triton.jit
def shared_splits_of(num_keys):
    return tl.cdiv(num_keys, _SHARED_FACTOR * split_size_of(num_keys))


@triton.jit
def attend(
    query,
    kv,
    scales,
    table,
    begin,
    end,
    kv_head,
    factor,
    cap,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    QUANTIZED: tl.constexpr,
):
    """Queries `[ROWS, DIM]` over keys begin...end of the blocks in `table`: weighted values, largest score in base 2,
    sum of probabilities."""
    half: tl.constexpr = KV_HEADS * BLOCK_SIZE  # slots of a block's keys; those of its values lie behind them
    token = tl.arange(0, TOKENS)
    dim = tl.arange(0, DIM)
    filled = dim < HEAD_DIM
    sums = tl.zeros([ROWS, DIM], tl.float32)
    peak = tl.full([ROWS], NOTHING, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    # The ids of the next tile's blocks are loaded one tile early: loaded in the same pass, K and V could not be asked
    # for before their ids are there, and the pipeline would be one tile shorter.
    place = begin + token
    blocks = tl.load(table + place // BLOCK_SIZE, mask=place < end, other=0)
    for first in range(begin, end, TOKENS):
        place = first + token
        seen = place < end
        later = place + TOKENS
        next_blocks = tl.load(table + later // BLOCK_SIZE, mask=later < end, other=0)
        slot = (blocks.to(tl.int64) * (2 * KV_HEADS) + kv_head) * BLOCK_SIZE + place % BLOCK_SIZE
        spot = kv + slot[:, None] * HEAD_DIM + dim[None, :]
        inside = seen[:, None] if HEAD_DIM == DIM else seen[:, None] & filled[None, :]
        keys = tl.trans(tl.load(spot, mask=inside, other=0.0).to(query.dtype))
        scores = tl.dot(query, keys, input_precision="ieee") * factor
        if QUANTIZED:
            scores *= tl.load(scales + slot, mask=seen, other=0.0)[None, :]
        # cap * tanh, by the sigmoid of twice its argument: 2s(2x) - 1; `factor` holds 2 / cap
        if HAS_CAP:
            scores = (2.0 / (1.0 + tl.exp2(-scores)) - 1.0) * cap
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        fade = tl.exp2(peak - new_peak)
        total = total * fade + tl.sum(weights, 1)
        if QUANTIZED:
            weights *= tl.load(scales + slot + half, mask=seen, other=0.0)[None, :]
        values = tl.load(spot + half * HEAD_DIM, mask=inside, other=0.0).to(query.dtype)
        sums = tl.dot(weights.to(query.dtype), values, sums * fade[:, None], input_precision="ieee")
        peak = new_peak
        blocks = next_blocks
    return sums, peak, total


def score_factors(scale: float, softcap: float) -> tuple[float, float]:
    """Returns the factor of a product in `attend`, and the factor of a squashed score."""
    log2_e = LOG2_E.value
    return (2 * scale / softcap * log2_e, softcap * log2_e) if softcap else (scale * log2_e, 0.0)


def constants(tiling: Tiling, kv_shape: torch.Size, group: int, has_cap: bool, quantized: bool) -> dict[str, Any]:
    """Returns the constants that the kernels over keys have in common."""
    return {
        "KV_HEADS": kv_shape[2],
        "GROUP": group,
        "BLOCK_SIZE": kv_shape[3],
        "HEAD_DIM": kv_shape[4],
        "DIM": triton.next_power_of_2(kv_shape[4]),
        "ROWS": tiling.rows,
        "TOKENS": tiling.tokens,
        "HAS_CAP": has_cap,
        "QUANTIZED": quantized,
    }


def specimen_name(head_dim: int, group: int, dtype: torch.dtype, kv: torch.dtype) -> str:
    return f"{head_dim} x {group} {dtype} over {kv}".replace("torch.", "")


def budget(
    tiling: Tiling, head_dim: int, dtype: torch.dtype, kv: torch.dtype, unit: Literal["mma", "wgmma"], registers: int
) -> Budget:
    """Returns the budget of a kernel; its least shared memory is that of all stages but the last one, filled ahead."""
    tile_bytes = 2 * tiling.tokens * triton.next_power_of_2(head_dim) * kv.itemsize
    return Budget(
        registers=registers,
        min_shared=(tiling.num_stages - 1) * tile_bytes,
        async_copies=True,
        matrix_unit=unit if dtype.itemsize == 2 else "",
    )
