"""Linear layers with quantized weights: rounded to nearest when the model is loaded, multiplied by the kernels' ops.

Knows formats and one product. Does not know which layer it is in. On a CPU the ops are plain torch and widen the
weight at every call: memory is saved there, not time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Int4:
    """What the op `linear_w4` takes."""

    weight: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    order: torch.Tensor | None

    @staticmethod
    def joined(several: Sequence[Int4]) -> Int4 | None:
        """Along the outputs; None where groups or orders differ."""
        first = several[0]
        if any(other.scale.shape[0] != first.scale.shape[0] for other in several):
            return None
        orders = [number.order for number in several]
        if any(order is None for order in orders):
            if not all(order is None for order in orders):
                return None
        elif not all(torch.equal(order, orders[0]) for order in orders):
            return None
        zero = None
        if any(number.zero is not None for number in several):
            zero = torch.cat([number.zeros() for number in several], dim=1)
        weight = torch.cat([number.weight for number in several], dim=1)
        return Int4(weight, torch.cat([n.scale for n in several], dim=1), zero, first.order)

    def zeros(self) -> torch.Tensor:
        if self.zero is not None:
            return self.zero
        return torch.full_like(self.scale, formats.SYMMETRIC_ZERO, dtype=torch.int8)


class _QuantLinear(nn.Module):
    """Rows of any leading shape in, rows out; the format is the subclass's."""

    def __init__(
        self,
        shape: Sequence[int],
        bias: torch.Tensor | None,
        ops: Ops,
        split: Split | None = None,
    ) -> None:
        """`shape`: outputs, inputs."""
        super().__init__()
        self.out_features, self.in_features = shape
        self.bias = bias
        self.split = split
        self._ops = ops

    def bind(self, ops: Ops) -> None:
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
        super().__init__(weight.shape, bias, ops, split)
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
        super().__init__(weight.shape, bias, ops, split)
        groups = [group for group in formats.GROUPS if self.in_features % group == 0]
        if not groups:
            raise ModelError(
                f"int4 needs layers whose inputs can be cut into groups of {formats.GROUPS[0]}, "
                f"but one has {self.in_features}."
            )
        self._weight, self._scale, _ = formats.quantize_int4(weight, max(groups))

    def _multiply(self, out: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._ops.weights.linear_w4(out, rows, self._weight, self._scale, bias=bias)


class StoredInt4Linear(_QuantLinear):
    """With the numbers that a checkpoint holds."""

    def __init__(
        self, numbers: Int4, bias: torch.Tensor | None, ops: Ops, dtype: torch.dtype
    ) -> None:
        super().__init__((numbers.weight.shape[1], 8 * len(numbers.weight)), bias, ops)
        self.numbers = numbers
        self._dtype = dtype

    @property
    def weight(self) -> torch.Tensor:
        """`[out_features, in_features]`, made at every call: for comparing, not for serving."""
        numbers = self.numbers
        wide = formats.dequantize_int4(numbers.weight, numbers.scale, numbers.zero, self._dtype)
        if numbers.order is not None:
            wide = torch.empty_like(wide).index_copy_(0, numbers.order.long(), wide)
        return wide.T

    def _multiply(self, out: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None) -> None:
        numbers = self.numbers
        how = (numbers.scale, numbers.zero, numbers.order, bias)
        self._ops.weights.linear_w4(out, rows, numbers.weight, *how)


def bind(model: nn.Module, ops: Ops) -> None:
    """Layers read from a checkpoint exist before the kernels are checked; from here they use these."""
    for module in model.modules():
        if isinstance(module, StoredInt4Linear):
            module.bind(ops)


def joined(linears: Sequence[nn.Module]) -> nn.Module | None:
    """One layer in the place of several with the same inputs, outputs behind each other; None unless all are stored in
    4 bits. Those whose inputs are grouped differently (GPTQ's activation order) stay themselves."""
    stored = [linear for linear in linears if isinstance(linear, StoredInt4Linear)]
    if len(stored) < len(linears):
        return None
    if len(stored) == 1:
        return stored[0]
    together = Int4.joined([linear.numbers for linear in stored])
    if together is None:
        return _SideBySide(stored)
    first, bias = stored[0], None
    if first.bias is not None:
        bias = torch.cat([linear.bias for linear in stored])
    return StoredInt4Linear(together, bias, first._ops, first._dtype)


class _SideBySide(nn.Module):
    def __init__(self, linears: Sequence[nn.Module]) -> None:
        super().__init__()
        self._linears = nn.ModuleList(linears)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([linear(x) for linear in self._linears], dim=-1)


class Fp8Linear(_QuantLinear):
    """A scale per output, and one per token for the activations, which are rounded too."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        ops: Ops,
        split: Split | None = None,
    ) -> None:
        super().__init__(weight.shape, bias, ops, split)
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
