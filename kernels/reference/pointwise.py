"""Plain-torch twins of `kernels.triton.pointwise`: rotary embedding and gated activations.

It knows tokens, heads and columns. All arithmetic is in float32, rounded once.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from kernels.reference.quant import quantize


def rope(out: torch.Tensor, x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> None:
    """Applies rotary position embedding (RoFormer, arXiv 2104.09864) to `[num_tokens, heads, D]`; `out` may be `x`.
    `table` is `[max_positions, R]` float32: the cosines of a position's R / 2 angles, then the sines. The first R
    columns of a head are rotated, the rest is unchanged. Angle i rotates the columns (i, i + R / 2)."""
    out.copy_(rotate(x.float(), table[positions]))


def rotate(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Returns `x` `[num_tokens, heads, D]` in float32, rotated by `rows` `[num_tokens, R]` of a table."""
    size = rows.shape[1]
    cos, sin = rows[:, None].chunk(2, dim=-1)
    low, high = x[..., :size].chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin, x[..., size:]), dim=-1)


def silu_mul(out: torch.Tensor, x: torch.Tensor, out_scales: torch.Tensor | None = None) -> None:
    """Writes `out` `[num_tokens, width]` = silu(gate) * value; `x` is `[num_tokens, 2 * width]`, gates then values.
    With `out_scales` `[num_tokens]` the output is 8-bit, with one scale per token (`kernels.reference.quant`)."""
    gate, value = x.float().chunk(2, dim=-1)
    store(out, F.silu(gate) * value, out_scales)


def gelu_mul(out: torch.Tensor, x: torch.Tensor, out_scales: torch.Tensor | None = None) -> None:
    """Does the same as `silu_mul`, with the tanh form of GELU."""
    gate, value = x.float().chunk(2, dim=-1)
    store(out, F.gelu(gate, approximate="tanh") * value, out_scales)


def store(out: torch.Tensor, wide: torch.Tensor, scales: torch.Tensor | None) -> None:
    """Writes float32 rows into `out`, quantized if there are scales to fill."""
    if scales is None:
        out.copy_(wide)
        return
    quantized, row_scales = quantize(wide, out.dtype)
    out.copy_(quantized)
    scales.copy_(row_scales)
