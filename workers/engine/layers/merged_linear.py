"""Joins linear layers with the same input into one product.

It knows inputs and outputs. It does not know whose layers they are, nor in which order they are called.
"""

from __future__ import annotations

import torch
from torch import nn

from workers.engine.layers import quant
from workers.engine.layers.linear import MakeLinear


def joined(make: MakeLinear, *linears: nn.Linear) -> nn.Module:
    """Returns one layer whose outputs are those of all layers, one after the other; layers that a checkpoint stores in
    a format keep it."""
    if (stored := quant.joined(linears)) is not None:
        return stored
    weight = torch.cat([linear.weight for linear in linears])
    split = getattr(linears[0], "split", None)
    if linears[0].bias is None:
        return make(weight, None, split)
    return make(weight, torch.cat([linear.bias for linear in linears]), split)


class Together(nn.Module):
    """A layer that computes the outputs of several layers when the first one is called, and keeps the others' outputs
    until they are called. An output is given once: a second call, or a call with another input, computes again."""

    def __init__(self, linear: nn.Module, sizes: tuple[int, ...]) -> None:
        """`sizes` has the number of outputs of each layer."""
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
    """One of the joined layers, in its old place: code that calls it needs no change."""

    def __init__(self, together: Together, part: int) -> None:
        super().__init__()
        self.together = together
        self._part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.together.take(self._part, x)
