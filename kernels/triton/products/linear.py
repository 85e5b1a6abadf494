"""Products of few rows with a weight `[out_features, in_features]`: their speed is limited by memory, not by the matrix
unit.

It knows one product, of weights of 8 bits. It is split along in_features so that all of the GPU loads weights; a second
launch adds the parts in a fixed order. The split depends on the weight's shape alone, so a row's sum does not depend on
other rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.triton.device import capability as capability_of
from kernels.triton.device import interpreting
from kernels.triton.products.partials import Around, affine, join, join_specimen, num_splits, space
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


def select(capability: int, num_tokens: int, out_features: int, in_features: int) -> Config:
    block_m, block_n = 16 if num_tokens <= 16 else 32, 64
    splits = num_splits(triton.cdiv(out_features, block_n), in_features)
    # 64 columns on 4 warps are capped at 64 registers by the assembler, and spill.
    return Config(block_m, block_n, 128, splits, 8, 4 if capability >= 90 else 3)


@triton.jit(do_not_specialize=["num_tokens"])
def _product(
    out,
    partials,
    x,
    weight,
    scale,
    row_scale,
    bias,
    num_tokens,
    width,
    in_features,
    split_size,
    HAS_SCALE: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    INLINE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Computes a tile of one split. INLINE: it is the only split, and the output is written; else partial sums are."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    k = tl.arange(0, BLOCK_K)
    alive = (row < num_tokens)[:, None]
    inside = column < width
    start_of = weight + column.to(tl.int64)[:, None] * in_features
    # 8-bit integers on both sides are summed as integers, exactly.
    INTEGER: tl.constexpr = x.dtype.element_ty == tl.int8 and not UPCAST
    SUM: tl.constexpr = tl.int32 if INTEGER else tl.float32
    acc = tl.zeros((BLOCK_M, BLOCK_N), SUM)
    end = tl.minimum((split + 1) * split_size, in_features)
    for start in range(split * split_size, end, BLOCK_K):
        there = start + k < in_features
        left = tl.load(x + row[:, None] * in_features + (start + k)[None, :], mask=alive & there[None, :], other=0.0)
        tile = tl.load(start_of + (start + k)[None, :], mask=inside[:, None] & there[None, :], other=0.0)
        if UPCAST:
            left = left.to(tl.float32)
            tile = tile.to(tl.float32)
        acc = tl.dot(left, tile.to(left.dtype).T, acc, input_precision="ieee", out_dtype=SUM)
    acc = acc.to(tl.float32)
    column = column[None, :]
    inside = inside[None, :] & alive
    if INLINE:
        factor = tl.full((BLOCK_M,), 1.0, tl.float32)
        if HAS_ROW_SCALE:
            factor = tl.load(row_scale + row, mask=row < num_tokens, other=0.0)
        value = affine(acc, factor[:, None], scale, bias, column, inside, HAS_SCALE, HAS_BIAS)
        tl.store(out + row[:, None] * width + column, value.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(partials + (split * num_tokens + row[:, None]) * width + column, acc, mask=inside)


def product(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, around: Around, workspace: torch.Tensor | None
) -> None:
    """Computes a product of up to MAX_ROWS_SPLIT rows. `weight` is int8, or e4m3 (then `x` too); `x` may be int8
    too."""
    num_tokens, in_features = x.shape
    width = out.shape[1]
    config = _config(x.device, num_tokens, *weight.shape)
    partials = space(workspace, x, *weight.shape) if config.splits > 1 else out
    grid = (triton.cdiv(num_tokens, config.block_m), triton.cdiv(width, config.block_n))
    _product[(*grid, config.splits)](
        out,
        partials,
        x,
        weight,
        x if around.scale is None else around.scale,
        x if around.row_scale is None else around.row_scale,
        x if around.bias is None else around.bias,
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
        join(out, partials, around, config.splits)


def split_size(in_features: int, config: Config) -> int:
    """Returns the in_features of a split: whole steps of the loop."""
    steps: int = triton.cdiv(in_features, config.block_k * config.splits)
    return steps * config.block_k


@functools.lru_cache(maxsize=4096)
def _config(device: torch.device, *shape: int) -> Config:
    return select(capability_of(device), *shape)


def specimens(capability: int) -> Iterator[Specimen]:
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
        (out, wide, x, weight, wide, wide, out, 16, 4096, 4096, 512),
        {**flags, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "UPCAST": False},
        budget,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
