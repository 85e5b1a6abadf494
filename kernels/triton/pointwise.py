"""Rotary embedding and gated activations, for models whose layers are not fused further.

It knows tokens, heads and columns. Arithmetic is in float32, rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.triton.device import capability
from kernels.triton.quant import LIMITS, encode, scale_of
from kernels.triton.specimen import Budget, Specimen

_MINUS_LOG2_E = tl.constexpr(-1.4426950408889634)
_GELU_SCALE = tl.constexpr(2 * 0.7978845608028654)
"""Twice the root of 2 / pi: tanh(u) = 2 sigmoid(2u) - 1."""


@dataclass(frozen=True)
class RopeConfig:
    heads: int
    """Number of heads of one token in one program."""
    num_warps: int = 4


@dataclass(frozen=True)
class GateConfig:
    block: int
    """Number of columns that a program holds at a time."""
    num_warps: int


def select(capability: int, head_dim: int) -> RopeConfig:
    """Chooses 2,048 numbers: 16 bytes of each half for every thread."""
    return RopeConfig(16 if head_dim <= 128 else 8)


def select_gate(capability: int, quantized: bool) -> GateConfig:
    """Chooses the part of a program: it takes a part of a row without quantization, and with it a whole row, twice."""
    return GateConfig(4096, 8) if quantized else GateConfig(1024, 4)


def half_block(size: int) -> int:
    """Returns the lanes for half of the `size` columns that are rotated; the length of arange has to be a power of
    two."""
    lanes: int = triton.next_power_of_2(size // 2)
    return max(1, lanes)


@triton.jit
def pair_columns(lane, SIZE: tl.constexpr):
    """Columns of the two numbers that angle `lane` turns."""
    return lane, lane + SIZE // 2


@triton.jit
def load_angles(table, positions, token, lane, SIZE: tl.constexpr):
    """Returns the cosine and sine of each angle at the position of a token."""
    row = table + tl.load(positions + token).to(tl.int64) * SIZE
    inside = lane < SIZE // 2
    cos = tl.load(row + lane, mask=inside, other=1.0)
    return cos, tl.load(row + SIZE // 2 + lane, mask=inside, other=0.0)


@triton.jit
def _rope(
    out,
    x,
    table,
    positions,
    out_token_stride,
    out_head_stride,
    token_stride,
    head_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    token = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    lane = tl.arange(0, HALF)[None, :]
    low_column, high_column = pair_columns(lane, SIZE)
    source = x + token.to(tl.int64) * token_stride + head * head_stride
    target = out + token.to(tl.int64) * out_token_stride + head * out_head_stride
    inside = (head < NUM_HEADS) & (lane < SIZE // 2)
    low = tl.load(source + low_column, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + high_column, mask=inside, other=0.0).to(tl.float32)
    cos, sin = load_angles(table, positions, token, lane, SIZE)
    tl.debug_barrier()  # out may be x: everything is read before anything is written
    tl.store(target + low_column, (low * cos - high * sin).to(out.dtype.element_ty), mask=inside)
    tl.store(target + high_column, (high * cos + low * sin).to(out.dtype.element_ty), mask=inside)
    if REST > 0:
        column = SIZE + tl.arange(0, REST)[None, :]
        inside = (head < NUM_HEADS) & (column < HEAD_DIM)
        tl.store(target + column, tl.load(source + column, mask=inside), mask=inside)


def rope(out: torch.Tensor, x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> None:
    """Computes the same as its twin in `kernels.reference.pointwise`."""
    num_tokens, num_heads, head_dim = x.shape
    if num_tokens == 0:
        return
    size = table.shape[1]
    config = select(capability(x.device), head_dim)
    in_place = out.data_ptr() == x.data_ptr()
    _rope[(num_tokens, triton.cdiv(num_heads, config.heads))](
        out,
        x,
        table,
        positions,
        out.stride(0),
        out.stride(1),
        x.stride(0),
        x.stride(1),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        SIZE=size,
        HEADS=config.heads,
        HALF=half_block(size),
        REST=0 if in_place or size == head_dim else triton.next_power_of_2(head_dim - size),
        num_warps=config.num_warps,
        enable_fp_fusion=False,
    )


@triton.jit
def _gated(row, column, WIDTH: tl.constexpr, GELU: tl.constexpr):
    inside = column < WIDTH
    gate = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(row + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    inner = gate
    if GELU:
        inner = (gate + 0.044715 * gate * gate * gate) * _GELU_SCALE
    exponent = tl.minimum(inner * _MINUS_LOG2_E, 126.0)  # from there on the gate is shut
    return gate / (1.0 + tl.exp2(exponent)) * value


@triton.jit
def _gate_mul(out, x, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    product = _gated(x + token * 2 * WIDTH, column, WIDTH, GELU)
    place = out + token * WIDTH + column
    tl.store(place, product.to(out.dtype.element_ty), mask=column < WIDTH)


@triton.jit
def _gate_mul_quantized(
    out, out_scales, x, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr, LIMIT: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    row = x + token * 2 * WIDTH
    lane = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, WIDTH, BLOCK):
        largest = tl.maximum(largest, tl.abs(_gated(row, start + lane, WIDTH, GELU)))
    scale, inverse = scale_of(tl.max(largest, axis=0), LIMIT)
    tl.store(out_scales + token, scale)
    for start in range(0, WIDTH, BLOCK):
        column = start + lane
        product = encode(_gated(row, column, WIDTH, GELU), inverse, LIMIT)
        place = out + token * WIDTH + column
        tl.store(place, product.to(out.dtype.element_ty), mask=column < WIDTH)


def silu_mul(out: torch.Tensor, x: torch.Tensor, out_scales: torch.Tensor | None = None) -> None:
    """Computes the same as its twin in `kernels.reference.pointwise`."""
    _launch_gate(out, x, out_scales, False)


def gelu_mul(out: torch.Tensor, x: torch.Tensor, out_scales: torch.Tensor | None = None) -> None:
    """Computes the same as its twin in `kernels.reference.pointwise`."""
    _launch_gate(out, x, out_scales, True)


def _launch_gate(out: torch.Tensor, x: torch.Tensor, out_scales: torch.Tensor | None, gelu: bool) -> None:
    num_tokens, width = out.shape
    if num_tokens == 0:
        return
    config = select_gate(capability(x.device), out_scales is not None)
    how: dict[str, Any] = {"WIDTH": width, "BLOCK": config.block, "GELU": gelu}
    how |= {"num_warps": config.num_warps, "enable_fp_fusion": False}
    if out_scales is None:
        _gate_mul[(num_tokens, triton.cdiv(width, config.block))](out, x, **how)
    else:
        limit = LIMITS[out.dtype]
        _gate_mul_quantized[(num_tokens,)](out, out_scales, x, LIMIT=limit, **how)


def specimens(capability: int) -> Iterator[Specimen]:
    yield from (_rope_specimen(capability, *shape) for shape in ((128, 128), (256, 64)))
    dtype, width = torch.bfloat16, 14_336
    eight = torch.float8_e4m3fn if capability >= 89 else torch.int8
    config = select_gate(capability, False)
    constants: dict[str, float] = {"WIDTH": width, "BLOCK": config.block, "GELU": True}
    options = {"enable_fp_fusion": False}
    yield Specimen("gelu_mul", _gate_mul, (dtype, dtype), constants, Budget(48), config.num_warps, 1, options)
    config = select_gate(capability, True)
    constants = {"WIDTH": width, "BLOCK": config.block, "GELU": False, "LIMIT": LIMITS[eight]}
    yield Specimen(
        f"silu_mul {str(eight)[6:]}",
        _gate_mul_quantized,
        (eight, torch.float32, dtype),
        constants,
        Budget(96),
        config.num_warps,
        1,
        options,
    )


def _rope_specimen(capability: int, head_dim: int, size: int) -> Specimen:
    config, dtype = select(capability, head_dim), torch.bfloat16
    return Specimen(
        f"rope {size} of {head_dim}",
        _rope,
        (dtype, dtype, torch.float32, torch.int64, 4096, head_dim, 6144, head_dim),
        {
            "NUM_HEADS": 32,
            "HEAD_DIM": head_dim,
            "SIZE": size,
            "HEADS": config.heads,
            "HALF": half_block(size),
            "REST": 0 if size == head_dim else triton.next_power_of_2(head_dim - size),
        },
        Budget(registers=64),
        config.num_warps,
        options={"enable_fp_fusion": False},
    )
