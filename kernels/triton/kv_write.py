"""Writes keys and values of new tokens into KV blocks: as they are, or first rotated and normalised, or in 8 bits.

It knows tokens, heads and slots. A program takes one token and a group of its heads; a token with slot -1 stores
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.arguments.batch import Slots
from kernels.triton.device import capability
from kernels.triton.pointwise import half_block, load_angles, pair_columns
from kernels.triton.quant import LIMITS, encode, scale_of
from kernels.triton.specimen import Budget, Specimen


@dataclass(frozen=True)
class Config:
    heads: int
    """Number of heads of one token in one program."""
    num_warps: int


def select(capability: int, head_dim: int) -> Config:
    """Chooses 2,048 numbers: 16 bytes of each half for every thread. Wide heads that are rotated only in part need more
    registers."""
    return Config(16, 4) if head_dim <= 128 else Config(8, 8)


@triton.jit
def _row_of(slot, head, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Returns the row of a layer seen as `[num_blocks * 2 * KVH * block_size, D]`; `head` counts keys, then values. The
    slot is not negative."""
    block = (slot // BLOCK_SIZE).to(tl.int64)
    return (block * (2 * KV_HEADS) + head) * BLOCK_SIZE + slot % BLOCK_SIZE


@triton.jit
def _kv_write(
    kv,
    kv_scales,
    key,
    value,
    slots,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
    LIMIT: tl.constexpr,
):
    token = tl.program_id(0)
    slot = tl.load(slots + token)
    if slot >= 0:
        # Programs of the first half of the grid's second axis store keys, the others values.
        group = tl.program_id(1)
        is_value = group >= tl.cdiv(KV_HEADS, HEADS)
        if is_value:
            group -= tl.cdiv(KV_HEADS, HEADS)
        head = group * HEADS + tl.arange(0, HEADS)
        column = tl.arange(0, DIMS)[None, :]
        inside = (head < KV_HEADS)[:, None] & (column < HEAD_DIM)
        if is_value:
            start = value + token.to(tl.int64) * value_token_stride
            x = tl.load(start + head[:, None] * value_head_stride + column, mask=inside, other=0.0)
            row = _row_of(slot, KV_HEADS + head, KV_HEADS, BLOCK_SIZE)
        else:
            start = key + token.to(tl.int64) * key_token_stride
            x = tl.load(start + head[:, None] * key_head_stride + column, mask=inside, other=0.0)
            row = _row_of(slot, head, KV_HEADS, BLOCK_SIZE)
        if LIMIT > 0.0:
            x = x.to(tl.float32)
            scale, inverse = scale_of(tl.max(tl.abs(x), axis=1), LIMIT)
            tl.store(kv_scales + row, scale, mask=head < KV_HEADS)
            x = encode(x, inverse[:, None], LIMIT)
        place = kv + row[:, None] * HEAD_DIM + column
        tl.store(place, x.to(kv.dtype.element_ty), mask=inside)


def kv_write(
    kv: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: Slots, kv_scales: torch.Tensor | None = None
) -> None:
    """Does the same as its twin in `kernels.reference.kv`."""
    num_tokens, num_kv_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    config = select(capability(kv.device), head_dim)
    _kv_write[(num_tokens, 2 * triton.cdiv(num_kv_heads, config.heads))](
        kv,
        kv if kv_scales is None else kv_scales,
        key,
        value,
        slots.slots,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=slots.block_size,
        HEADS=config.heads,
        DIMS=triton.next_power_of_2(head_dim),
        LIMIT=LIMITS[kv.dtype],
        num_warps=config.num_warps,
        enable_fp_fusion=False,
    )


@triton.jit
def _normed(x, factor, head, column, query_norm, key_norm, inside, QUERY_HEADS: tl.constexpr):
    """Returns a part of each head times its norm's factor and weight."""
    of_query = tl.load(query_norm + column, mask=inside, other=0.0).to(tl.float32)
    of_key = tl.load(key_norm + column, mask=inside, other=0.0).to(tl.float32)
    return x * factor * tl.where(head < QUERY_HEADS, of_query, of_key)


@triton.jit
def _rope_kv_write(
    kv,
    kv_scales,
    qkv,
    table,
    positions,
    slots,
    query_norm,
    key_norm,
    qkv_stride,
    eps,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    NORM: tl.constexpr,
    LIMIT: tl.constexpr,
):
    token = tl.program_id(0)
    slot = tl.load(slots + token)
    # Heads of queries, then of keys, then of values; the first two kinds turn, the last two are stored.
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    head = heads[:, None]
    exists = head < QUERY_HEADS + 2 * KV_HEADS
    turns = head < QUERY_HEADS + KV_HEADS
    is_query = head < QUERY_HEADS
    is_stored = exists & (head >= QUERY_HEADS)
    lane = tl.arange(0, HALF)[None, :]
    low_column, high_column = pair_columns(lane, SIZE)
    rest_column = SIZE + tl.arange(0, max(1, REST))[None, :]
    in_half, in_rest = lane < SIZE // 2, rest_column < HEAD_DIM
    source = qkv + token.to(tl.int64) * qkv_stride + head * HEAD_DIM
    low = tl.load(source + low_column, mask=exists & in_half, other=0.0).to(tl.float32)
    high = tl.load(source + high_column, mask=exists & in_half, other=0.0).to(tl.float32)
    rest = tl.zeros((HEADS, max(1, REST)), tl.float32)
    if REST > 0:
        rest = tl.load(source + rest_column, mask=exists & in_rest, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
        if REST > 0:
            squares += tl.sum(rest * rest, axis=1)
        factor = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        normed = _normed(low, factor, head, low_column, query_norm, key_norm, in_half, QUERY_HEADS)
        low = tl.where(turns, normed, low)
        normed = _normed(high, factor, head, high_column, query_norm, key_norm, in_half, QUERY_HEADS)
        high = tl.where(turns, normed, high)
        if REST > 0:
            normed = _normed(rest, factor, head, rest_column, query_norm, key_norm, in_rest, QUERY_HEADS)
            rest = tl.where(turns, normed, rest)
    cos, sin = load_angles(table, positions, token, lane, SIZE)
    turned_low, turned_high = low * cos - high * sin, high * cos + low * sin
    low, high = tl.where(turns, turned_low, low), tl.where(turns, turned_high, high)
    tl.debug_barrier()  # queries turn in place: everything is read before anything is written
    of_query = is_query & in_half
    tl.store(source + low_column, low.to(qkv.dtype.element_ty), mask=of_query)
    tl.store(source + high_column, high.to(qkv.dtype.element_ty), mask=of_query)
    if NORM and REST > 0:
        tl.store(source + rest_column, rest.to(qkv.dtype.element_ty), mask=is_query & in_rest)
    if slot >= 0:
        # Heads of queries are masked, so they may point at the first one.
        stored_head = tl.maximum(heads - QUERY_HEADS, 0)
        row = _row_of(slot, stored_head, KV_HEADS, BLOCK_SIZE)
        if LIMIT > 0.0:
            largest = tl.maximum(tl.max(tl.abs(low), axis=1), tl.max(tl.abs(high), axis=1))
            if REST > 0:
                largest = tl.maximum(largest, tl.max(tl.abs(rest), axis=1))
            scale, inverse = scale_of(largest, LIMIT)
            is_scaled = (heads >= QUERY_HEADS) & (heads < QUERY_HEADS + 2 * KV_HEADS)
            tl.store(kv_scales + row, scale, mask=is_scaled)
            low = encode(low, inverse[:, None], LIMIT)
            high = encode(high, inverse[:, None], LIMIT)
            rest = encode(rest, inverse[:, None], LIMIT)
        target = kv + row[:, None] * HEAD_DIM
        tl.store(target + low_column, low.to(kv.dtype.element_ty), mask=is_stored & in_half)
        tl.store(target + high_column, high.to(kv.dtype.element_ty), mask=is_stored & in_half)
        if REST > 0:
            tl.store(target + rest_column, rest.to(kv.dtype.element_ty), mask=is_stored & in_rest)


def rope_kv_write(
    kv: torch.Tensor,
    qkv: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    slots: Slots,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Does the same as its twin in `kernels.reference.kv`."""
    num_kv_heads, head_dim, size = kv.shape[2], kv.shape[4], table.shape[1]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    if len(qkv) == 0:
        return
    config = select(capability(kv.device), head_dim)
    query_norm, key_norm = (table, table) if norms is None else norms
    _rope_kv_write[(len(qkv), triton.cdiv(num_heads + 2 * num_kv_heads, config.heads))](
        kv,
        kv if kv_scales is None else kv_scales,
        qkv,
        table,
        positions,
        slots.slots,
        query_norm,
        key_norm,
        qkv.stride(0),
        eps,
        QUERY_HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        SIZE=size,
        BLOCK_SIZE=slots.block_size,
        HEADS=config.heads,
        HALF=half_block(size),
        REST=0 if size == head_dim else triton.next_power_of_2(head_dim - size),
        NORM=norms is not None,
        LIMIT=LIMITS[kv.dtype],
        num_warps=config.num_warps,
        enable_fp_fusion=False,
    )


def specimens(capability: int) -> Iterator[Specimen]:
    eight = torch.float8_e4m3fn if capability >= 89 else torch.int8
    for head_dim, stored in ((128, torch.bfloat16), (80, torch.int8), (256, eight)):
        yield _write_specimen(capability, head_dim, stored)
    for head_dim, size, stored in (
        (128, 128, torch.bfloat16),
        (64, 64, eight),
        (80, 32, torch.bfloat16),
        (256, 64, torch.int8),
    ):
        yield _rope_specimen(capability, head_dim, size, stored)


def _write_specimen(capability: int, head_dim: int, stored: torch.dtype) -> Specimen:
    config, dtype, limit = select(capability, head_dim), torch.bfloat16, LIMITS[stored]
    scales = torch.float32 if limit else stored
    strides = (8 * head_dim, head_dim, 8 * head_dim, head_dim)
    return Specimen(
        f"kv_write {head_dim} {str(stored)[6:]}",
        _kv_write,
        (stored, scales, dtype, dtype, torch.int32, *strides),
        {
            "KV_HEADS": 8,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": 16,
            "HEADS": config.heads,
            "DIMS": triton.next_power_of_2(head_dim),
            "LIMIT": limit,
        },
        Budget(registers=48),
        config.num_warps,
        options={"enable_fp_fusion": False},
    )


def _rope_specimen(capability: int, head_dim: int, size: int, stored: torch.dtype) -> Specimen:
    """Returns a specimen, with a norm if the head is 128 or 256 wide."""
    config, dtype, limit = select(capability, head_dim), torch.bfloat16, LIMITS[stored]
    scales = torch.float32 if limit else stored
    inputs = (dtype, torch.float32, torch.int64, torch.int32, dtype, dtype)
    return Specimen(
        f"rope_kv_write {size} of {head_dim} {str(stored)[6:]}",
        _rope_kv_write,
        (stored, scales, *inputs, 48 * head_dim, 1e-6),
        {
            "QUERY_HEADS": 32,
            "KV_HEADS": 8,
            "HEAD_DIM": head_dim,
            "SIZE": size,
            "BLOCK_SIZE": 16,
            "HEADS": config.heads,
            "HALF": half_block(size),
            "REST": 0 if size == head_dim else triton.next_power_of_2(head_dim - size),
            "NORM": head_dim in (128, 256),
            "LIMIT": limit,
        },
        Budget(registers=144 if head_dim > 128 else 64),
        config.num_warps,
        options={"enable_fp_fusion": False},
    )
