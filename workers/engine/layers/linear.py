"""Linear layers of a CPU worker: weights reordered once for oneDNN, instead of at every call.

Knows weights and one product. Does not know which layer it is in.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

_ROWS_HINT = 32
"""Rows the reordering is tuned for; every other number works with the same weight."""
MIN_ROWS = 4
"""A CPU pass is filled up to so many tokens. Four rows take no longer than one, and oneDNN sums the products of a
single row in another order than those of two and more: with it a token's result does not depend on how many others
share its step."""


Join = Callable[[torch.Tensor], torch.Tensor]
"""Makes a layer's output of the outputs that the ranks have of their parts."""


class SplitLinear(nn.Linear):
    """One rank's part of a linear layer whose output exists only once the ranks' outputs are joined. The bias is the
    whole layer's and is added behind that, once."""

    def __init__(self, part: nn.Linear, join: Join) -> None:
        """Takes over the tensors of `part`."""
        nn.Module.__init__(self)
        self.weight, self.bias = part.weight, part.bias
        self.out_features, self.in_features = part.weight.shape
        self.join = join

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _joined(self.join, F.linear(x, self.weight), self.bias)


def _joined(join: Join, product: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    whole = join(product)
    return whole if bias is None else whole + bias


class PackedLinear(nn.Module):
    """`F.linear` on a reordered weight. The original is not kept; where the reordering is not available, it is."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, join: Join | None = None
    ) -> None:
        super().__init__()
        self.join = join
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
        if self.join is None:
            return self._product(x, self.bias)
        return _joined(self.join, self._product(x, None), self.bias)

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


def pack_linears(model: nn.Module) -> int:
    """Puts a packed layer in the place of every plain one; returns how many. A weight that something else still
    uses (a tied embedding) stays for that use."""
    number = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) in (nn.Linear, SplitLinear):
                join = getattr(child, "join", None)
                setattr(module, name, PackedLinear(child.weight.detach(), child.bias, join))
                number += 1
    return number
