"""Plain-torch twin of `kernels.triton.norm`."""

from __future__ import annotations

import torch

from kernels.reference.pointwise import store


def rms_norm(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    plus_one: bool = False,
    cast_first: bool = True,
    out_scales: torch.Tensor | None = None,
) -> None:
    """Writes to `out` the norm of `x` `[num_rows, hidden]` times `weight`, with statistics in float32. With `residual`,
    the residual becomes residual + x, and that sum is normalised. `plus_one`: the factor is 1 + weight. `cast_first`:
    the normalised row is rounded to x's dtype before the product (Llama), else only the product is (Gemma, gpt-oss).
    With `out_scales` `[num_rows]` the output is 8-bit, with one scale per row (`kernels.reference.quant`)."""
    if residual is not None:
        residual += x
        x = residual
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    if cast_first:
        scaled = scaled.to(x.dtype).float()
    factor = weight.float() + 1.0 if plus_one else weight.float()
    store(out, factor * scaled, out_scales)
