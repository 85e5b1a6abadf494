"""Products with quantized weights: int8 per channel, 4 or 8 bits per group, int8 and e4m3 with activations of 8 bits.

With few rows, the weight is widened in registers before the matrix unit, and its scale multiplies sums, not weights.
With many rows, the weight is written out once per call, in the type of the activations, for a library product; e4m3 is
passed to the library as it is. Layouts and quantizing: `kernels.reference.linear`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.reference import linear as reference
from kernels.reference.linear import FP8_MAX, INT8_MAX, MAX_ROWS_SPLIT, int8_products
from kernels.triton.device import capability as capability_of
from kernels.triton.device import interpreting
from kernels.triton.products import linear
from kernels.triton.products.partials import Around, affine, join, num_splits, space
from kernels.triton.quant import nearest
from kernels.triton.specimen import Budget, Specimen

_DEQUANTIZE_BLOCK = 2048
_QUANTIZE_BLOCK = 1024
_RESCALE_BLOCK = 1024
_AS_WRITTEN = {"enable_fp_fusion": False}
"""The option of Triton with which tokens are rounded as their twin rounds them."""


@dataclass(frozen=True)
class ConfigW4:
    block_m: int
    block_n: int
    splits: int
    num_warps: int
    num_stages: int

    @property
    def tile(self) -> tuple[int, ...]:
        return (self.block_m, self.block_n, self.num_warps, self.num_stages)


def select_w4(capability: int, num_tokens: int, out_features: int, in_features: int, group: int) -> ConfigW4:
    """Chooses the configuration. A step of the loop is one group; a short one needs more columns to be copied in
    16-byte pieces, and there must be enough pieces for all warps. More than 16 rows use taller tiles only if groups are
    long; else the weight is read again, from the second-level cache."""
    block_m = 32 if num_tokens > 16 and group == 128 else 16
    block_n = 64 if group == 128 else 128
    num_warps = 4 if group == 32 else 8
    splits = num_splits(triton.cdiv(out_features, block_n), in_features)
    return ConfigW4(block_m, block_n, splits, num_warps, 5 if capability >= 90 else 4)


@triton.jit(do_not_specialize=["num_tokens"])
def _product_w4(
    partials,
    x,
    weight,
    scale,
    zero,
    order,
    num_tokens,
    out_features,
    in_features,
    split_size,
    HAS_ZERO: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Returns the partial sums of a tile of one split; the groups of the split, one after another. The numbers of a
    group are whole (at most ±255), so they are exact in any type; their scale multiplies the group's sum."""
    WORD: tl.constexpr = 32 // BITS
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    k = tl.arange(0, GROUP)
    word = tl.arange(0, GROUP // WORD)
    shift = tl.arange(0, WORD) * BITS
    alive = (row < num_tokens)[:, None]
    inside = column < out_features
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    end = tl.minimum((split + 1) * split_size, in_features)
    for start in range(split * split_size, end, GROUP):
        source = start + k
        if HAS_ORDER:
            source = tl.load(order + source)
        left = tl.load(x + row[:, None] * in_features + source[None, :], mask=alive, other=0.0)
        if UPCAST:
            left = left.to(tl.float32)
        words = start // WORD + word
        packed = tl.load(
            weight + words.to(tl.int64)[:, None] * out_features + column[None, :], mask=inside[None, :], other=0
        )
        parts = (packed[:, None, :] >> shift[None, :, None]) & ((1 << BITS) - 1)
        numbers = tl.reshape(parts, (GROUP, BLOCK_N))
        place = start // GROUP * out_features + column
        if HAS_ZERO:
            numbers -= tl.load(zero + place, mask=inside, other=0).to(tl.int32)[None, :]
        else:
            numbers -= 1 << (BITS - 1)
        factor = tl.load(scale + place, mask=inside, other=0.0).to(tl.float32)
        total = tl.dot(left, numbers.to(left.dtype), input_precision="ieee")
        acc += total * factor[None, :]
    place = partials + (split * num_tokens + row[:, None]) * out_features + column[None, :]
    tl.store(place, acc, mask=alive & inside[None, :])


@triton.jit
def _dequantize_w8(out, weight, scale, in_features, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < in_features
    number = tl.load(weight + row * in_features + column, mask=inside, other=0).to(tl.float32)
    value = number * tl.load(scale + row).to(tl.float32)
    tl.store(out + row * in_features + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _dequantize_w4(
    out,
    weight,
    scale,
    zero,
    order,
    out_features,
    HAS_ZERO: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows of `out` `[in_features, out_features]` from one packed row; `order` undone on the way."""
    WORD: tl.constexpr = 32 // BITS
    word = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < out_features
    packed = tl.load(weight + word * out_features + column, mask=inside, other=0)
    place = word * WORD // GROUP * out_features + column
    factor = tl.load(scale + place, mask=inside, other=0.0).to(tl.float32)
    offset = tl.full((BLOCK,), 1 << (BITS - 1), tl.int32)
    if HAS_ZERO:
        offset = tl.load(zero + place, mask=inside, other=0).to(tl.int32)
    for part in tl.static_range(WORD):
        target = word * WORD + part
        if HAS_ORDER:
            target = tl.load(order + target).to(tl.int64)
        value = (((packed >> (BITS * part)) & ((1 << BITS) - 1)) - offset).to(tl.float32) * factor
        tl.store(out + target * out_features + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _quantize_tokens(out, scale, x, in_features, LIMIT: tl.constexpr, INTEGER: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, in_features, BLOCK):
        inside = start + column < in_features
        value = tl.load(x + row * in_features + start + column, mask=inside, other=0.0)
        largest = tl.maximum(largest, tl.abs(value.to(tl.float32)))
    found = tl.div_rn(tl.max(largest, axis=0), LIMIT)
    found = tl.where(found > 0, found, 1.0)
    tl.store(scale + row, found)
    for start in range(0, in_features, BLOCK):
        inside = start + column < in_features
        value = tl.load(x + row * in_features + start + column, mask=inside, other=0.0)
        value = tl.clamp(tl.div_rn(value.to(tl.float32), found), -LIMIT, LIMIT)
        if INTEGER:
            value = nearest(value)
        tl.store(out + row * in_features + start + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rescale(out, sums, row_scale, scale, bias, width, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.load(sums + row * width + column, mask=inside, other=0).to(tl.float32)
    factor = tl.load(row_scale + row)
    value = affine(total, factor, scale, bias, column, inside, True, HAS_BIAS)
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


def linear_w8(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> None:
    """Computes the same as its twin in `kernels.reference.linear`."""
    if len(x) <= MAX_ROWS_SPLIT:
        linear.product(out, x, weight, Around(bias=bias, scale=scale), workspace)
        return
    out_features, in_features = weight.shape
    wide = _wide(workspace, x, (out_features, in_features))
    _dequantize_w8[(out_features, triton.cdiv(in_features, _DEQUANTIZE_BLOCK))](
        wide, weight, scale, in_features, BLOCK=_DEQUANTIZE_BLOCK, num_warps=4
    )
    _library(out, x, wide.T, bias)


def linear_w4(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> None:
    """Computes the same as its twin in `kernels.reference.linear`."""
    num_tokens, in_features = x.shape
    group = in_features // len(scale)
    flags = {
        "HAS_ZERO": zero is not None,
        "HAS_ORDER": order is not None,
        "BITS": 32 * len(weight) // in_features,
        "GROUP": group,
    }
    zero, order = scale if zero is None else zero, scale if order is None else order
    out_features = weight.shape[1]
    if num_tokens > MAX_ROWS_SPLIT:
        wide = _wide(workspace, x, (in_features, out_features))
        _dequantize_w4[(len(weight), triton.cdiv(out_features, _DEQUANTIZE_BLOCK))](
            wide, weight, scale, zero, order, out_features, **flags, BLOCK=_DEQUANTIZE_BLOCK, num_warps=4
        )
        _library(out, x, wide, bias)
        return
    config = _config_w4(x.device, num_tokens, out_features, in_features, group)
    partials = space(workspace, x, out_features, in_features)
    split_size = triton.cdiv(in_features, group * config.splits) * group
    grid = (triton.cdiv(num_tokens, config.block_m), triton.cdiv(out_features, config.block_n))
    _product_w4[(*grid, config.splits)](
        partials,
        x,
        weight,
        scale,
        zero,
        order,
        num_tokens,
        out_features,
        in_features,
        split_size,
        **flags,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        UPCAST=interpreting(),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    join(out, partials, Around(bias=bias), config.splits)


def linear_fp8(
    out: torch.Tensor,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> None:
    """Computes the same as its twin in `kernels.reference.linear`."""
    if len(x) <= MAX_ROWS_SPLIT:
        around = Around(bias=bias, scale=scale, row_scale=x_scale)
        linear.product(out, x, weight, around, workspace)
        return
    if out.dtype == torch.float32:  # the library adds no bias to it, and most GPUs have no product with such an output
        reference.linear_fp8(out, x, x_scale, weight, scale, bias)
        return
    torch._scaled_mm(x, weight.T, x_scale[:, None], scale[None, :], bias=bias, out_dtype=out.dtype, out=out)


def linear_w8a8(
    out: torch.Tensor,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> None:
    """Computes the same as its twin in `kernels.reference.linear`."""
    if len(x) <= MAX_ROWS_SPLIT:
        around = Around(bias=bias, scale=scale, row_scale=x_scale)
        linear.product(out, x, weight, around, workspace)
        return
    sums = int8_products(x, weight)
    _rescale[(len(x), triton.cdiv(len(weight), _RESCALE_BLOCK))](
        out,
        sums,
        x_scale,
        scale,
        scale if bias is None else bias,
        len(weight),
        HAS_BIAS=bias is not None,
        BLOCK=_RESCALE_BLOCK,
        num_warps=4,
    )


def quantize_tokens(out: torch.Tensor, scale: torch.Tensor, x: torch.Tensor) -> None:
    """Computes the same as its twin in `kernels.reference.linear`."""
    _quantize_tokens[(len(x),)](
        out, scale, x, x.shape[1], **_token_format(out.dtype), BLOCK=_QUANTIZE_BLOCK, num_warps=4, **_AS_WRITTEN
    )


def _token_format(dtype: torch.dtype) -> dict[str, float | bool]:
    integer = dtype == torch.int8
    return {"LIMIT": INT8_MAX if integer else FP8_MAX, "INTEGER": integer}


def _wide(workspace: torch.Tensor | None, x: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Returns memory for a whole weight in the type of `x`."""
    size = shape[0] * shape[1]
    if workspace is None:
        return torch.empty(shape, dtype=x.dtype, device=x.device)
    return workspace.view(x.dtype)[:size].view(shape)


def _library(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    if bias is None:
        torch.mm(x, weight, out=out)
    else:
        torch.addmm(bias, x, weight, out=out)


@functools.lru_cache(maxsize=4096)
def _config_w4(device: torch.device, *shape: int) -> ConfigW4:
    return select_w4(capability_of(device), *shape)


def specimens(capability: int) -> Iterator[Specimen]:
    yield from _specimens_8bit(capability)
    yield from _specimens_w4(capability)
    dtype, scale = torch.bfloat16, torch.float32
    block = {"BLOCK": _DEQUANTIZE_BLOCK}
    yield Specimen("dequantize int8", _dequantize_w8, (dtype, torch.int8, scale, 4096), block, Budget(64))
    yield Specimen(
        "dequantize int4, zero points, order",
        _dequantize_w4,
        (dtype, torch.int32, dtype, torch.int8, torch.int32, 4096),
        {"HAS_ZERO": True, "HAS_ORDER": True, "BITS": 4, "GROUP": 128, **block},
        Budget(96),
    )
    yield Specimen(
        "dequantize 8 bits by group, zero points, order",
        _dequantize_w4,
        (dtype, torch.int32, dtype, torch.uint8, torch.int32, 4096),
        {"HAS_ZERO": True, "HAS_ORDER": True, "BITS": 8, "GROUP": 128, **block},
        Budget(96),
    )
    yield Specimen(
        "rescale int32 sums",
        _rescale,
        (dtype, torch.int32, scale, scale, dtype, 4096),
        {"HAS_BIAS": True, "BLOCK": _RESCALE_BLOCK},
        Budget(64),
    )


def _specimens_8bit(capability: int) -> Iterator[Specimen]:
    formats = [("w8", torch.bfloat16, torch.int8), ("w8a8", torch.int8, torch.int8)]
    tokens = [torch.int8]
    if capability >= 89:
        formats.append(("fp8", torch.float8_e4m3fn, torch.float8_e4m3fn))
        tokens.append(torch.float8_e4m3fn)
    for dtype in tokens:
        yield Specimen(
            f"tokens to {'int8' if dtype == torch.int8 else 'fp8'}",
            _quantize_tokens,
            (dtype, torch.float32, torch.bfloat16, 4096),
            {**_token_format(dtype), "BLOCK": _QUANTIZE_BLOCK},
            Budget(64),
            options=_AS_WRITTEN,
        )
    off = Around().flags
    for name, x, weight in formats:
        for rows, out_features, inline in ((16, 28672, True), (32, 4096, False)):
            config = linear.select(capability, rows, out_features, 4096)
            scales = {"HAS_SCALE": True, "HAS_ROW_SCALE": name != "w8", "INLINE": inline}
            yield linear.specimen(
                f"linear_{name}, {config.block_m} rows",
                capability,
                config,
                (x, weight),
                off | scales,
                Budget(
                    registers=128,
                    min_shared=(config.num_stages - 1) * config.block_n * config.block_k,
                    async_copies=True,
                    matrix_unit="mma",
                ),
            )


def _specimens_w4(capability: int) -> Iterator[Specimen]:
    shapes = ((32, 16), (64, 16), (128, 16), (128, 32))
    for (group, rows), bits in itertools.product(shapes, (4, 8)):
        config = select_w4(capability, rows, 4096, 4096, group)
        has_order = group == 32 or rows == 32
        yield Specimen(
            f"linear_w4, {bits} bits, group {group}, {config.block_m} rows",
            _product_w4,
            (
                torch.float32,
                torch.bfloat16,
                torch.int32,
                torch.bfloat16,
                torch.int8 if bits == 4 else torch.uint8,
                torch.int32,
                16,
                4096,
                4096,
                512,
            ),
            {
                "HAS_ZERO": has_order or group == 64,
                "HAS_ORDER": has_order,
                "BITS": bits,
                "GROUP": group,
                "BLOCK_M": config.block_m,
                "BLOCK_N": config.block_n,
                "UPCAST": False,
            },
            Budget(
                registers=128 if rows == 16 else 168,
                min_shared=(config.num_stages - 1) * group * bits // 8 * config.block_n
                if (group, bits) != (32, 8)
                else 0,
                async_copies=(group, bits) != (32, 8),  # too short a tile: loads are plain
                matrix_unit="mma",
            ),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
