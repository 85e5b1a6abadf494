"""8-bit numbers with one float32 scale per row, inside other kernels: equal bit for bit to `kernels.reference.quant`.

The product with the reciprocal and the rounding after it must not be fused into one operation: a kernel that calls
`encode` is launched with `enable_fp_fusion=False`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.reference import quant

LIMITS = quant.LIMITS | dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), 0.0)
"""The constant LIMIT of a kernel that writes this dtype; 0 means not quantized."""
_TINY = tl.constexpr(quant.TINY)
_INT8 = tl.constexpr(quant.LIMITS[torch.int8])
_ROUND = tl.constexpr(1.5 * 2.0**23)
"""A constant that, added to a small float32 and subtracted again, rounds it to the nearest integer, ties to even."""


@triton.jit
def scale_of(largest, LIMIT: tl.constexpr):
    """Returns, for the largest magnitudes of rows, their scales and the factors to multiply the rows with."""
    limit = tl.full(largest.shape, LIMIT, tl.float32)
    largest = tl.where(largest < _TINY, limit, largest)
    return tl.div_rn(largest, limit), tl.div_rn(limit, largest)


@triton.jit
def nearest(x):
    """Rounds small numbers to integers, ties to even."""
    return (x + _ROUND) - _ROUND


@triton.jit
def encode(x, inverse, LIMIT: tl.constexpr):
    """Scales and rounds rows; only the cast to the 8-bit type remains to be done."""
    x = x * inverse
    if LIMIT == _INT8:
        x = nearest(x)
    return x
