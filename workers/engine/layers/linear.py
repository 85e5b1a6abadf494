"""Linear layers of a CPU worker: weights reordered once for oneDNN, instead of at every call.

Knows weights and one product. Does not know which layer it is in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

_ROWS_HINT = 32
"""Rows the reordering is tuned for; every other number works with the same weight."""
MIN_ROWS = 4
"""A CPU pass is filled up to so many tokens. Four rows take no longer than one, and oneDNN sums the products of a
single row in another order than those of two and more: with it a token's result does not depend on how many others
share its step."""


@dataclass(frozen=True, slots=True)
class Split:
    """How the layer's output comes from the outputs that the ranks have of their parts."""

    join: Callable[[torch.Tensor], torch.Tensor]
    inputs: slice | None = None
    """What this rank's part takes of an input that every rank has whole; None: the input is its own."""

    def apply(
        self,
        product: Callable[[torch.Tensor, None], torch.Tensor],
        x: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """The bias is the whole layer's: it is added behind the join, once."""
        own = x if self.inputs is None else x[..., self.inputs]
        whole = self.join(product(own, None))
        return whole if bias is None else whole + bias


MakeLinear = Callable[[torch.Tensor, torch.Tensor | None, Split | None], nn.Module]
"""From a weight `[out_features, in_features]`, its bias and its split over ranks to a layer."""


class SplitLinear(nn.Linear):
    """One rank's part of a linear layer whose output exists only once the ranks' outputs are joined."""

    def __init__(self, part: nn.Linear, split: Split) -> None:
        """Takes over the tensors of `part`."""
        nn.Module.__init__(self)
        self.weight, self.bias = part.weight, part.bias
        self.out_features, self.in_features = part.weight.shape
        self.split = split

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.split.apply(self._product, x, self.bias)

    def _product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, self.weight, bias)


class PackedLinear(nn.Module):
    """`F.linear` on a reordered weight. The original is not kept; where the reordering is not available, it is."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, split: Split | None = None
    ) -> None:
        super().__init__()
        self.split = split
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        # Not parameters: oneDNN's layout is opaque, nothing but its own product may read it.
        self._packed: torch.Tensor | None = None
        self._plain: torch.Tensor | None = None
        if can_pack(weight):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)
        else:
            self._plain = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.split is None:
            return self._product(x, self.bias)
        return self.split.apply(self._product, x, self.bias)

    def _product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self._packed is None:
            return F.linear(x, self._plain, bias)
        if x.numel() == 0:
            return x.new_empty((*x.shape[:-1], self.out_features))
        rows = x.reshape(-1, self.in_features)
        out = torch.ops.mkldnn._linear_pointwise(rows, self._packed, bias, "none", [], "")
        return out.view(*x.shape[:-1], self.out_features)


def can_pack(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def pack_linears(
    model: nn.Module, make: MakeLinear = PackedLinear, head: nn.Module | None = None
) -> int:
    """Puts a layer of `make` in the place of every plain one, a packed one in that of the `head`; returns how many. A
    weight that something else still uses (a tied embedding) stays for that use."""
    number = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) in (nn.Linear, SplitLinear):
                split = getattr(child, "split", None)
                layer = PackedLinear if child is head else make
                setattr(module, name, layer(child.weight.detach(), child.bias, split))
                number += 1
    return number
