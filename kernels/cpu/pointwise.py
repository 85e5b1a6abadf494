"""Norms, rotations and gates of one row, in float32.

It knows a row's numbers. It does not know layers.
"""

from __future__ import annotations

import math

from numba import njit

from kernels.cpu.lanes import (
    fma,
    larger,
    load,
    number_at,
    power_of_two,
    put_number,
    rounded,
    smaller,
    spread,
    store,
    store_bf16,
    total,
    where_below,
)

SILU, GELU, EXACT_GELU = 0, 1, 2
"""Functions of a gate: GELU in its form with tanh, and in its exact form with the error function."""
_GELU = math.sqrt(2.0 / math.pi)
_SMALL = 0.15
"""Below it the first four terms of tanh's series are exact to 2e-8."""
_LEAST, _MOST = -87.0, 88.0
"""Bounds of exponents whose powers of e are normal float32 numbers."""


@njit(nogil=True)
def exp_lanes(x):
    """Returns e to the x, to 2 units in the last place; 0 below -87. Source: Cephes' expf."""
    bounded = smaller(larger(x, spread(_LEAST)), spread(_MOST))
    whole = rounded(bounded * spread(1.44269504088896341))
    rest = fma(whole, spread(-0.693359375), bounded)
    rest = fma(whole, spread(2.12194440e-4), rest)
    sum = spread(1.9875691500e-4)
    sum = fma(sum, rest, spread(1.3981999507e-3))
    sum = fma(sum, rest, spread(8.3334519073e-3))
    sum = fma(sum, rest, spread(4.1665795894e-2))
    sum = fma(sum, rest, spread(1.6666665459e-1))
    sum = fma(sum, rest, spread(5.0000001201e-1))
    sum = fma(sum, rest * rest, rest + spread(1.0))
    return where_below(x, spread(_LEAST), spread(0.0), sum * power_of_two(whole))


@njit(nogil=True)
def rms_norm(out, x, weight, size, eps, narrow):
    """Writes the RMSNorm of a row. `size` is a multiple of 16; `out` may be `x`, or is bfloat16 if `narrow`."""
    squares = spread(0.0)
    for at in range(0, size, 16):
        part = load(x + 4 * at)
        squares = fma(part, part, squares)
    scale = spread(1.0 / math.sqrt(total(squares) / size + eps))
    for at in range(0, size, 16):
        part = load(x + 4 * at) * scale * load(weight + 4 * at)
        if narrow:
            store_bf16(out + 2 * at, part)
        else:
            store(out + 4 * at, part)


@njit(nogil=True)
def layer_norm(out, x, weight, bias, size, eps, narrow):
    """Writes the LayerNorm of a row. `size` is a multiple of 16; `out` may be `x`, or is bfloat16 if `narrow`."""
    sums = spread(0.0)
    for at in range(0, size, 16):
        sums = sums + load(x + 4 * at)
    mean = spread(total(sums) / size)
    # Squares of differences, in a second pass: the square of a large mean would take their digits.
    squares = spread(0.0)
    for at in range(0, size, 16):
        part = load(x + 4 * at) - mean
        squares = fma(part, part, squares)
    scale = spread(1.0 / math.sqrt(total(squares) / size + eps))
    for at in range(0, size, 16):
        part = fma((load(x + 4 * at) - mean) * scale, load(weight + 4 * at), load(bias + 4 * at))
        if narrow:
            store_bf16(out + 2 * at, part)
        else:
            store(out + 4 * at, part)


@njit(nogil=True)
def activated(function, x):
    """Returns a gate's function. SiLU is x times a logistic function, and GELU with tanh is one of another number."""
    if function == EXACT_GELU:
        return _exact_gelu(x)
    y = x
    if function == GELU:
        y = x * fma(x * x, spread(2.0 * _GELU * 0.044715), spread(2.0 * _GELU))
    return x / (spread(1.0) + exp_lanes(spread(0.0) - y))


@njit(nogil=True)
def _exact_gelu(x):
    """Returns x times the share of a normal distribution below x. Source: Abramowitz and Stegun, 7.1.26, for the share
    beyond |x|, to 1e-7; where x is below 0 that share is the result's factor, so that small ones keep their digits."""
    size = larger(x, spread(0.0) - x) * spread(math.sqrt(0.5))
    t = spread(1.0) / fma(size, spread(0.3275911), spread(1.0))
    sum = fma(t, spread(1.061405429), spread(-1.453152027))
    sum = fma(sum, t, spread(1.421413741))
    sum = fma(sum, t, spread(-0.284496736))
    sum = fma(sum, t, spread(0.254829592))
    beyond = spread(0.5) * sum * t * exp_lanes(spread(0.0) - size * size)
    return x * where_below(x, spread(0.0), beyond, spread(1.0) - beyond)


@njit(nogil=True)
def capped(x, cap):
    """Returns cap · tanh(x / cap). Where x is small its difference from x is computed, so that no digits are lost."""
    size = larger(x, spread(0.0) - x) / spread(cap)
    large = spread(1.0) - spread(2.0) / (spread(1.0) + exp_lanes(size + size))
    square = size * size
    series = fma(square, spread(-17.0 / 315.0), spread(2.0 / 15.0))
    series = fma(square, series, spread(-1.0 / 3.0))
    small = fma(size * square, series, size)
    found = where_below(size, spread(_SMALL), small, large) * spread(cap)
    return where_below(x, spread(0.0), spread(0.0) - found, found)


@njit(nogil=True)
def rotate(out, x, turns, turned, head_dim, scale):
    """Rotates the first `turned` columns of a head by a position's angles, and multiplies all columns by a number.
    `turns` is float32, the cosines of turned / 2 angles, then their sines; angle i rotates the columns (i, i + turned /
    2). `out` may be `x`."""
    rest = 4 * turned
    while rest < 4 * head_dim and rest % 64 != 0:
        put_number(out + rest, number_at(x + rest) * scale)
        rest += 4
    for at in range(rest, 4 * head_dim, 64):
        store(out + at, load(x + at) * spread(scale))
    half = 2 * turned
    if turned % 32 == 0:
        factor = spread(scale)
        for at in range(0, half, 64):
            cos, sin = load(turns + at) * factor, load(turns + half + at) * factor
            low, high = load(x + at), load(x + half + at)
            store(out + at, low * cos - high * sin)
            store(out + half + at, high * cos + low * sin)
        return
    for at in range(0, half, 4):
        cos, sin = number_at(turns + at) * scale, number_at(turns + half + at) * scale
        low, high = number_at(x + at), number_at(x + half + at)
        put_number(out + at, low * cos - high * sin)
        put_number(out + half + at, high * cos + low * sin)
