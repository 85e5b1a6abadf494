"""Weights of 4 bits as checkpoints may hold them: with zero points."""

from __future__ import annotations

import torch

from kernels.reference import linear as formats

Told = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def quantized(weight: torch.Tensor, group: int, symmetric: bool) -> Told:
    """Packed weight, scale and zero point, as `linear_w4` takes them. Zero points are rounded too: with them the error is
    at most a whole scale."""
    if symmetric:
        return formats.quantize_int4(weight, group)
    out_features, in_features = weight.shape
    wide = weight.float().T.reshape(in_features // group, group, out_features)
    low, high = wide.amin(1).clamp_(max=0), wide.amax(1).clamp_(min=0)
    scale = torch.where(high > low, (high - low) / 15, 1.0)
    zero = (-low / scale).round_().clamp_(0, 15).to(torch.int8)
    scale = scale.to(weight.dtype)
    numbers = ((wide / scale.float()[:, None]).round_() + zero[:, None]).clamp_(0, 15).to(torch.int32)
    return formats.pack_words(numbers.view(in_features, out_features)), scale, zero
