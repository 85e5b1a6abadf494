"""Plain-torch twins of `kernels.triton.products.linear_quant`, and the formats of quantized weights.

It knows matrices: `x` `[num_tokens, in_features]`, `weight` `[out_features, in_features]` or its quantized form.
Weights are quantized once, at load, by rounding to nearest.
"""

from __future__ import annotations

import functools

import torch
from torch.nn import functional as F

GROUPS = (32, 64, 128)
"""Supported numbers of weights along in_features that share an int4 scale."""
MAX_ROWS_SPLIT = 64
"""Up to this number of rows a quantized weight is dequantized in registers; above, into a workspace for the library."""
MAX_SPLITS = 16
INT8_MAX = 127.0
_EXACT_TERMS = 1024
"""Number of products of int8 whose sum float32 holds exactly, in whatever order."""
_LEAST_ROWS = 17
"""Least number of rows that torch's product of int8 takes on a GPU."""
FP8_MAX = 448.0
"""Largest number of e4m3; torch gives NaN above it."""


def linear_w8(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> None:
    """Multiplies by `weight` int8 `[out_features, in_features]` with `scale` `[out_features]`."""
    out.copy_(F.linear(x, dequantize_int8(weight, scale, x.dtype), bias))


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
    """Multiplies by `weight` int32 `[in_features / 8, out_features]`, with `scale` `[in_features / group,
    out_features]`, `zero` int8 of the same shape (none means 8 everywhere), and `order` int32 `[in_features]`: packed
    row k belongs to column `order[k]` of `x`. With `in_features / 4` rows the numbers have 8 bits, `zero` is uint8, and
    none means 128."""
    if order is not None:
        x = x.index_select(1, order)
    bits = 32 * len(weight) // x.shape[1]
    out.copy_(F.linear(x, dequantize_int4(weight, scale, zero, x.dtype, bits).T, bias))


def linear_fp8(
    out: torch.Tensor,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> None:
    """Multiplies `x` and `weight` in e4m3, with `x_scale` `[num_tokens]` and `scale` `[out_features]` float32. The
    8-bit products are exact in float32."""
    result = F.linear(x.float(), weight.float()) * x_scale[:, None] * scale
    out.copy_(result if bias is None else result + bias.float())


def linear_w8a8(
    out: torch.Tensor,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> None:
    """Multiplies `x` and `weight` in int8, with `x_scale` `[num_tokens]` and `scale` `[out_features]` float32. Sums are
    int32: a token's sum is the same among any number of others."""
    result = int8_products(x, weight).float() * x_scale[:, None] * scale
    out.copy_(result if bias is None else result + bias.float())


def int8_products(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns the sums of products, int32 `[num_tokens, out_features]`."""
    if x.device.type != "cpu":
        missing = max(0, _LEAST_ROWS - len(x))
        return torch._int_mm(F.pad(x, (0, 0, 0, missing)), weight.T)[: len(x)]
    if not _saturates():
        return torch._int_mm(x, weight.T)
    sums = torch.zeros((len(x), len(weight)), dtype=torch.int32)
    for left, right in zip(x.split(_EXACT_TERMS, 1), weight.split(_EXACT_TERMS, 1), strict=True):
        sums += F.linear(left.float(), right.float()).to(torch.int32)
    return sums


@functools.cache
def _saturates() -> bool:
    """Returns whether oneDNN adds pairs of products in 16 bits, in which they do not fit, as on a CPU without VNNI."""
    left, right = (torch.full((number, 256), 127, dtype=torch.int8) for number in (9, 64))
    return bool((torch._int_mm(left, right.T) != 256 * 127**2).any())


def quantize_tokens(out: torch.Tensor, scale: torch.Tensor, x: torch.Tensor) -> None:
    """Writes `out` e4m3 or int8 `[num_tokens, in_features]` and `scale` float32 `[num_tokens]` with out · scale ≈ `x`.
    A row of zeros has scale 1."""
    quantized, found = quantize_int8(x) if out.dtype == torch.int8 else quantize_fp8(x)
    out.copy_(quantized)
    scale.copy_(found)


def workspace_size(num_tokens: int, out_features: int, in_features: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """Returns the float32 elements that any product of this shape needs as workspace: partial sums of its
    splits, or the dequantized weight of a large one."""
    partial = MAX_SPLITS * min(num_tokens, MAX_ROWS_SPLIT) * out_features
    if num_tokens <= MAX_ROWS_SPLIT:
        return partial
    return max(partial, out_features * in_features * dtype.itemsize // 4)


def quantize_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns int8 `[out_features, in_features]` in ±127 and float32 scales `[out_features]`; the error is at most half
    a scale."""
    scale = _scales(weight.float().abs().amax(1), INT8_MAX)
    return (weight.float() / scale[:, None]).round_().to(torch.int8), scale


def quantize_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns e4m3 and float32 scales per row; the error is at most 1/16 of an element, or 2⁻¹⁰ scales near zero."""
    wide = weight.float()
    scale = _scales(wide.abs().amax(1), FP8_MAX)
    return (wide / scale[:, None]).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def quantize_int4(weight: torch.Tensor, group: int = 128) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Returns packed weight, scale in the dtype of the weight, and no zero point, as `linear_w4` takes them. The error is
    at most half a scale."""
    out_features, in_features = weight.shape
    if group not in GROUPS or in_features % group:
        raise ValueError(f"in_features {in_features} cannot be cut into groups of {group}")
    wide = weight.float().T.reshape(in_features // group, group, out_features)
    scale = _not_zero(_scales(wide.abs().amax(1), 7.0).to(weight.dtype))
    numbers = (wide / scale.float()[:, None]).round_() + symmetric_zero(4)
    return pack_words(numbers.clamp_(0, 15).to(torch.int32).view(in_features, out_features)), scale, None


def dequantize_int8(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (weight.float() * scale.float()[:, None]).to(dtype)


def dequantize_int4(
    weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, dtype: torch.dtype, bits: int = 4
) -> torch.Tensor:
    """Returns `[in_features, out_features]`, in packed order."""
    numbers = unpack_words(weight, bits)
    in_features, out_features = numbers.shape
    grouped = numbers.view(len(scale), in_features // len(scale), out_features)
    offset = symmetric_zero(bits) if zero is None else zero[:, None].to(torch.int32)
    wide = (grouped - offset).float() * scale.float()[:, None]
    return wide.view(in_features, out_features).to(dtype)


def symmetric_zero(bits: int) -> int:
    """Returns the offset of a packed number without a zero point."""
    return 1 << (bits - 1)


def pack_words(numbers: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """Packs int32 `[in_features, out_features]` in 0…2ᵇ-1 to `[in_features · b / 32, out_features]`, the first in the
    lowest bits."""
    parts = numbers.to(torch.int64).view(len(numbers) * bits // 32, 32 // bits, -1)
    packed = (parts << _shifts(bits, numbers.device)[:, None]).sum(1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def unpack_words(packed: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """Unpacks words: the inverse of `pack_words`."""
    parts = (packed[:, None] >> _shifts(bits, packed.device)[:, None]) & ((1 << bits) - 1)
    return parts.to(torch.int32).reshape(32 // bits * len(packed), -1)


def sort_groups(packed: torch.Tensor, group_ids: torch.Tensor, bits: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorts a GPTQ weight with activation order, whose row k is in group `group_ids[k]` (`g_idx`): returns the rows
    sorted by group, as `linear_w4` needs them, and the `order` to pass with them."""
    order = torch.argsort(group_ids, stable=True)
    return pack_words(unpack_words(packed, bits)[order], bits), order.to(torch.int32)


def _scales(largest: torch.Tensor, limit: float) -> torch.Tensor:
    """Returns the scales with which the largest magnitudes become the limit. Both sides of the division are tensors: for a
    plain number torch multiplies by a rounded reciprocal on a GPU, and the kernel divides."""
    return _not_zero(largest / torch.full_like(largest, limit))


def _not_zero(scale: torch.Tensor) -> torch.Tensor:
    """Returns the scales with 1 instead of 0, because they are divisors."""
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def _shifts(bits: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, 32, bits, device=device)
