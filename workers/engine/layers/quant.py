"""Linear layers with quantized weights: rounded to nearest when the model is loaded, multiplied by the kernels' ops.

Knows formats and one product. Does not know which layer it is in. On a CPU the ops are plain torch and widen the
weight at every call: memory is saved there, not time.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from kernels.dispatch import Ops
from kernels.reference import linear as formats
from workers.engine.errors import ModelError
from workers.engine.layers.linear import MakeLinear, PackedLinear, Split

Format = Literal["none", "int8", "int4", "fp8"]


def linear_maker(kind: Format, ops: Ops) -> MakeLinear:
    """What builds the layers of a model in this format. Raises ModelError if the device has no such numbers."""
    if kind == "none":
        return PackedLinear
    layer = {"int8": Int8Linear, "int4": Int4Linear, "fp8": Fp8Linear}[kind]
    if kind == "fp8" and ops.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(ops.device)
        if (major, minor) < (8, 9):
            raise ModelError(
                f"This GPU (capability {major}.{minor}) has no 8-bit floats: use int8."
            )

    def make(
        weight: torch.Tensor, bias: torch.Tensor | None, split: Split | None = None
    ) -> nn.Module:
        return layer(weight, bias, ops, split)

    return make


class _QuantLinear(nn.Module):
    """Rows of any leading shape in, rows out; the format is the subclass's."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        ops: Ops,
        split: Split | None = None,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.split = split
        self._ops = ops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.split is None:
            return self._product(x, self.bias)
        return self.split.apply(self._product, x, self.bias)

    def _product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features).contiguous()
        out = rows.new_empty((len(rows), self.out_features))
        if len(rows):
            self._multiply(out, rows, bias)
        return out.view(*x.shape[:-1], self.out_features)

    def _multiply(self, out: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None) -> None:
        raise NotImplementedError


class Int8Linear(_QuantLinear):
    """A scale per output."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        ops: Ops,
        split: Split | None = None,
    ) -> None:
        super().__init__(weight, bias, ops, split)
        self._weight, self._scale = formats.quantize_int8(weight)

    def _multiply(self, out: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._ops.weights.linear_w8(out, rows, self._weight, self._scale, bias)


class Int4Linear(_QuantLinear):
    """A scale per output and group of inputs; symmetric. Groups are as long as the layer allows, at most 128."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        ops: Ops,
        split: Split | None = None,
    ) -> None:
        super().__init__(weight, bias, ops, split)
        groups = [group for group in formats.GROUPS if self.in_features % group == 0]
        if not groups:
            raise ModelError(
                f"int4 needs layers whose inputs can be cut into groups of {formats.GROUPS[0]}, "
                f"but one has {self.in_features}."
            )
        self._weight, self._scale, _ = formats.quantize_int4(weight, max(groups))

    def _multiply(self, out: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._ops.weights.linear_w4(out, rows, self._weight, self._scale, bias=bias)


class Fp8Linear(_QuantLinear):
    """A scale per output, and one per token for the activations, which are rounded too."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        ops: Ops,
        split: Split | None = None,
    ) -> None:
        super().__init__(weight, bias, ops, split)
        if self.out_features % 16 or self.in_features % 16:
            raise ModelError(
                f"fp8 needs layers whose inputs and outputs are multiples of 16, "
                f"but one has {self.in_features} and {self.out_features}."
            )
        self._weight, self._scale = formats.quantize_fp8(weight)

    def _multiply(self, out: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None) -> None:
        quantized = torch.empty_like(rows, dtype=torch.float8_e4m3fn)
        scale = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
        self._ops.weights.quantize_tokens(quantized, scale, rows)
        self._ops.weights.linear_fp8(out, quantized, scale, self._weight, self._scale, bias)
