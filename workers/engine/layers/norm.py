"""RMSNorm on a CPU.

It knows rows and a weight. It does not know which model it is in.
"""

from __future__ import annotations

import math

import torch


class RmsNorm:
    """RMSNorm in float32 by three operations instead of the eight that torch uses."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        """`weight` is `[size]`, like the rows in float32."""
        size = len(weight)
        self._scaled = weight * math.sqrt(size)
        self._least = torch.tensor(math.sqrt(size * eps))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x * self._scaled).div_(length.hypot_(self._least))
