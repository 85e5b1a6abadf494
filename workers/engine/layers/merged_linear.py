"""Linear layers that are given the same input, as one product.

Knows inputs and outputs. Does not know whose layers they are, nor in which order they are called.
"""

from __future__ import annotations

import torch
from torch import nn

from workers.engine.layers import quant
from workers.engine.layers.linear import MakeLinear


def joined(make: MakeLinear, *linears: nn.Linear) -> nn.Module:
    """One layer whose outputs are those of all, behind each other; what a checkpoint stores in a format keeps it."""
    if (stored := quant.joined(linears)) is not None:
        return stored
    weight = torch.cat([linear.weight for linear in linears])
    split = getattr(linears[0], "split", None)
    if linears[0].bias is None:
        return make(weight, None, split)
    return make(weight, torch.cat([linear.bias for linear in linears]), split)


class Together(nn.Module):
    """Computes for all when the first one is asked, and keeps what the others will ask for. An output is given once:
    who asks again, or with another input, has it computed again."""

    def __init__(self, linear: nn.Module, sizes: tuple[int, ...]) -> None:
        """`sizes`: outputs of each."""
        super().__init__()
        self.linear = linear
        self._sizes = sizes
        self._input: torch.Tensor | None = None
        self._outputs: dict[int, torch.Tensor] = {}

    def take(self, part: int, x: torch.Tensor) -> torch.Tensor:
        if self._input is not x or part not in self._outputs:
            self._input = x
            self._outputs = dict(enumerate(self.linear(x).split(self._sizes, dim=-1)))
        out = self._outputs.pop(part)
        if not self._outputs:
            self._input = None
        return out


class Part(nn.Module):
    """One of them, in its old place: code that calls it needs no change."""

    def __init__(self, together: Together, part: int) -> None:
        super().__init__()
        self.together = together
        self._part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.together.take(self._part, x)
