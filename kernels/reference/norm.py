"""Plain-torch twin of `kernels.norm`."""

from __future__ import annotations

import torch


def rms_norm(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
) -> None:
    """`out` = norm of `x` `[num_tokens, hidden]` times `weight`, statistics in float32. With `residual`: it becomes
    residual + x, and that sum is normalised."""
    if residual is not None:
        residual += x
        x = residual
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    out.copy_(weight * scaled.to(x.dtype))
