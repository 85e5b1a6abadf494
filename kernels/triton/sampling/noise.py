"""Counter-based noise inside Triton kernels: Philox4x32-10 and log of standard exponential numbers.

It knows words and counters. The layout of counter and key, and the formula, are those of `kernels.reference.sample`.
"""

from __future__ import annotations

import triton
import triton.language as tl

_PURPOSE_SAMPLE = tl.constexpr(0)
_LARGEST_BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Computes Philox4x32-10 (Salmon and others 2011) on unsigned 32-bit words."""
    for _ in tl.static_range(10):
        product0 = c0.to(tl.uint64) * 0xD2511F53
        product1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = product1.to(tl.uint32)
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = product0.to(tl.uint32)
        k0 = (k0.to(tl.uint64) + 0x9E3779B9).to(tl.uint32)
        k1 = (k1.to(tl.uint64) + 0xBB67AE85).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def noise_words(seeds, positions, row, quad):
    """Returns the four words of the tokens of each quad."""
    zero = tl.zeros_like(quad).to(tl.uint32)
    position = tl.load(positions + row).to(tl.uint32) + zero
    low = tl.load(seeds + row * 2).to(tl.uint32) + zero
    high = tl.load(seeds + row * 2 + 1).to(tl.uint32) + zero
    return philox(position, quad.to(tl.uint32), zero + _PURPOSE_SAMPLE, zero, low, high)


@triton.jit
def log_exponential(word):
    uniform = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, _LARGEST_BELOW_ONE)
    small = uniform + 0.5 * uniform * uniform
    return tl.log(tl.where(uniform < 0.0009765625, small, -tl.log(1.0 - uniform)))
