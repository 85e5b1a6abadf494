"""8-bit numbers with one float32 scale per row: the rule that twins and Triton kernels share bit for bit.

It knows rows of values. It does not know what they are. Symmetric: value = quantized * scale, scale = largest magnitude
of the row / largest number of the format. A row whose magnitudes are all below `TINY` has scale 1 and is stored as
zeros.
"""

from __future__ import annotations

import torch

LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
TINY = 2.0**-100
"""Rows with smaller magnitudes count as zero: the reciprocal of their scale would overflow."""


def is_quantized(dtype: torch.dtype) -> bool:
    return dtype in LIMITS


def quantize(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns values `[..., n]` in `dtype`, and their `[...]` float32 scales. Values are rounded to the nearest, ties
    to even."""
    wide = values.float()
    largest = wide.abs().amax(dim=-1)
    # Both sides of the division are tensors: for a plain number torch multiplies by a rounded reciprocal.
    limit = torch.full_like(largest, LIMITS[dtype])
    largest = torch.where(largest < TINY, limit, largest)
    scaled = wide * (limit / largest)[..., None]
    return (scaled.round() if dtype is torch.int8 else scaled).to(dtype), largest / limit


def widen(values: torch.Tensor) -> torch.Tensor:
    """Returns the values in float32, without scales. A CPU converts fp8 one number at a time: a table of all 256 is
    twenty times as fast."""
    if values.dtype is not torch.float8_e4m3fn or values.device.type != "cpu":
        return values.float()
    table = torch.arange(256, dtype=torch.uint8).view(values.dtype).float()
    return table.index_select(0, bits(values).flatten().int()).view(values.shape)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns one-byte formats as plain bytes, because torch can move those on every device."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
