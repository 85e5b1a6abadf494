"""Products of few rows with a weight `[out_features, in_features]`: their speed is limited by memory, not by the matrix
unit.

Knows one product: RMSNorm before it and SiLU-mul or residual after it, and weights of any 8- or 16-bit type. A product
is split along in_features so that all of the GPU loads weights; a second launch adds the parts in a fixed order. The
split depends on the weight's shape alone, so a row's sum does not depend on other rows.

The norm needs no launch of its own: Σ x·g·W / rms(x) is summed undivided, each split adds up the squares of its own
part of x, and the program that has them all divides.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.triton.device import capability as capability_of
from kernels.triton.device import interpreting
from kernels.triton.products.partials import Around, affine, join, join_specimen, num_splits, silu, space
from kernels.triton.specimen import Budget, Specimen


@dataclass(frozen=True)
class Config:
    block_m: int
    block_n: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int

    @property
    def tile(self) -> tuple[int, ...]:
        """Returns the values that the compiled code depends on."""
        return (self.block_m, self.block_n, self.block_k, self.num_warps, self.num_stages)


def select(capability: int, num_tokens: int, out_features: int, in_features: int, gated: bool, itemsize: int) -> Config:
    """Chooses the configuration. `itemsize` is the bytes of a weight. If `gated` is set, a tile has gate and up
    columns, so it takes half of each."""
    block_m = 16 if num_tokens <= 16 else 32
    narrow = gated or (itemsize > 1 and out_features <= 2048)
    block_n = 32 if narrow else 64
    columns = out_features // 2 if gated else out_features
    splits = num_splits(triton.cdiv(columns, block_n), in_features)
    if itemsize > 2:  # float32, for tests and exactness: fewer stages fit
        return Config(block_m, 32, 64, splits, 4, 3)
    # 64 columns on 4 warps are capped at 64 registers by the assembler, and spill.
    num_warps = 4 if block_n == 32 else 8
    return Config(block_m, block_n, 128, splits, num_warps, 4 if capability >= 90 else 3)


@triton.jit(do_not_specialize=["num_tokens"])
def _product(
    out,
    partials,
    x,
    weight,
    norm,
    scale,
    row_scale,
    bias,
    residual,
    eps,
    num_tokens,
    width,
    in_features,
    split_size,
    HAS_NORM: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    INLINE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """A tile of one split. INLINE: it is the only split, and the output is written; else partial sums are, gate and up
    side by side, and the program of the first columns adds its sums of squares behind all of them."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    k = tl.arange(0, BLOCK_K)
    alive = (row < num_tokens)[:, None]
    inside = column < width
    start_of = weight + column.to(tl.int64)[:, None] * in_features
    up_of = weight + (column + width).to(tl.int64)[:, None] * in_features
    # 8-bit integers on both sides are summed as integers, exactly.
    INTEGER: tl.constexpr = x.dtype.element_ty == tl.int8 and not UPCAST
    SUM: tl.constexpr = tl.int32 if INTEGER else tl.float32
    acc = tl.zeros((BLOCK_M, BLOCK_N), SUM)
    up_acc = tl.zeros((BLOCK_M, BLOCK_N), SUM)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    end = tl.minimum((split + 1) * split_size, in_features)
    for start in range(split * split_size, end, BLOCK_K):
        there = start + k < in_features
        left = tl.load(x + row[:, None] * in_features + (start + k)[None, :], mask=alive & there[None, :], other=0.0)
        tile = tl.load(start_of + (start + k)[None, :], mask=inside[:, None] & there[None, :], other=0.0)
        if UPCAST:
            left = left.to(tl.float32)
            tile = tile.to(tl.float32)
        if HAS_NORM:
            wide = left.to(tl.float32)
            squares += tl.sum(wide * wide, axis=1)
            factor = tl.load(norm + start + k, mask=there, other=0.0).to(tl.float32)
            left = (wide * factor[None, :]).to(left.dtype)
        acc = tl.dot(left, tile.to(left.dtype).T, acc, input_precision="ieee", out_dtype=SUM)
        if GATED:
            other = tl.load(up_of + (start + k)[None, :], mask=inside[:, None] & there[None, :], other=0.0)
            if UPCAST:
                other = other.to(tl.float32)
            up_acc = tl.dot(left, other.to(left.dtype).T, up_acc, input_precision="ieee", out_dtype=SUM)
    acc = acc.to(tl.float32)
    up_acc = up_acc.to(tl.float32)
    column = column[None, :]
    inside = inside[None, :] & alive
    if INLINE:
        factor = tl.full((BLOCK_M,), 1.0, tl.float32)
        if HAS_ROW_SCALE:
            factor = tl.load(row_scale + row, mask=row < num_tokens, other=0.0)
        if HAS_NORM:
            factor = tl.rsqrt(squares / in_features + eps)
        value = affine(acc, factor[:, None], scale, bias, column, inside, HAS_SCALE, HAS_BIAS)
        if GATED:
            up = affine(up_acc, factor[:, None], scale, bias, column + width, inside, HAS_SCALE, HAS_BIAS)
            value = silu(value) * up
        place = row[:, None] * width + column
        if HAS_RESIDUAL:
            value += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)
    else:
        stride = width * 2 if GATED else width
        place = partials + (split * num_tokens + row[:, None]) * stride + column
        tl.store(place, acc, mask=inside)
        if GATED:
            tl.store(place + width, up_acc, mask=inside)
        if HAS_NORM and tl.program_id(1) == 0:
            behind = partials + tl.num_programs(2) * num_tokens * stride
            tl.store(behind + split * num_tokens + row, squares, mask=row < num_tokens)


def linear_small(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> None:
    """Computes the same as its twin in `kernels.reference.linear`."""
    product(out, x, weight, Around(bias, norm, eps, gated, residual), workspace)


def product(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, around: Around, workspace: torch.Tensor | None
) -> None:
    """Computes a product of up to MAX_ROWS_SPLIT rows. `weight` has x's dtype, int8, or e4m3 (then `x` too); `x` may be
    int8 too."""
    num_tokens, in_features = x.shape
    width = out.shape[1]
    config = _config(x.device, num_tokens, *weight.shape, around.gated, weight.itemsize)
    partials = space(workspace, x, *weight.shape) if config.splits > 1 else out
    grid = (triton.cdiv(num_tokens, config.block_m), triton.cdiv(width, config.block_n))
    _product[(*grid, config.splits)](
        out,
        partials,
        x,
        weight,
        x if around.norm is None else around.norm,
        x if around.scale is None else around.scale,
        x if around.row_scale is None else around.row_scale,
        x if around.bias is None else around.bias,
        x if around.residual is None else around.residual,
        around.eps,
        num_tokens,
        width,
        in_features,
        split_size(in_features, config),
        **around.flags,
        INLINE=config.splits == 1,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        UPCAST=interpreting(),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if config.splits > 1:
        join(out, partials, around, in_features, config.splits)


def split_size(in_features: int, config: Config) -> int:
    """Returns the in_features of a split: whole steps of the loop."""
    steps: int = triton.cdiv(in_features, config.block_k * config.splits)
    return steps * config.block_k


@functools.lru_cache(maxsize=4096)
def _config(device: torch.device, *shape: Any) -> Config:
    return select(capability_of(device), *shape)


_ALL_OFF = Around().flags


def specimens(capability: int) -> Iterator[Specimen]:
    dtype = torch.bfloat16
    stages = select(capability, 1, 4096, 4096, False, 2).num_stages
    for name, rows, out_features, in_features, gated in (
        ("norm, split", 16, 4096, 14336, False),
        ("norm, gated", 16, 28672, 4096, True),
    ):
        config = select(capability, rows, out_features, in_features, gated, 2)
        tile_bytes = config.block_n * config.block_k * 2 * (2 if gated else 1)
        flags = _ALL_OFF | {"HAS_NORM": True, "GATED": gated, "INLINE": config.splits == 1}
        yield specimen(
            f"linear_small {name}",
            capability,
            config,
            (dtype, dtype),
            flags,
            Budget(registers=168, min_shared=(stages - 1) * tile_bytes, async_copies=True, matrix_unit="mma"),
        )
    yield join_specimen()


def specimen(
    name: str,
    capability: int,
    config: Config,
    dtypes: tuple[torch.dtype, torch.dtype],
    flags: dict[str, bool],
    budget: Budget,
) -> Specimen:
    """Returns the specimen of `_product` for activations and weights of these types."""
    x, weight = dtypes
    out, wide = torch.bfloat16, torch.float32
    return Specimen(
        name,
        _product,
        (out, wide, x, weight, out, wide, wide, out, out, 1e-6, 16, 4096, 4096, 512),
        {**flags, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "UPCAST": False},
        budget,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
