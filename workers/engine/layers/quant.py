"""Linear layers with quantized weights: rounded to nearest when the model is loaded, or stored that way in a
checkpoint.

It knows formats, each with its numbers and its product. It does not know which layer it is in. On a CPU the ops are
plain torch and widen most weights at every call: this saves memory there, not time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import nn

from kernels.dispatch import Ops, has_fp8
from kernels.reference import linear as formats
from workers.engine.layers.linear import MakeLinear, PackedLinear, Split
from workers.engine.sizing.capacity import Format
from workers.engine.values.errors import ModelError

Kind = Literal["int8", "fp8", "w8a8", "llm_int8"]
"""Formats with 8 bits and a scale per output; all but int8 round activations too."""

OUTLIER = 6.0
"""Activations of at least this magnitude are not rounded by llm_int8: the threshold of arXiv 2208.07339."""
_MULTIPLE = {"fp8": 16, "w8a8": 8, "llm_int8": 8}
"""Numbers of inputs and of outputs have to be multiples of these for the library's products."""


class Numbers(Protocol):
    """A quantized weight."""

    @property
    def shape(self) -> tuple[int, int]:
        """Number of outputs and of inputs."""

    def multiply(self, ops: Ops, out: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None) -> None: ...

    def wide(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the weight in `dtype`, `[out_features, in_features]`."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight with 4 or 8 bits and a scale per output and group of inputs, as the op `linear_w4` takes it."""

    weight: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    order: torch.Tensor | None
    bits: int = 4

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[1], 32 // self.bits * len(self.weight)

    def multiply(self, ops: Ops, out: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None) -> None:
        ops.weights.linear_w4(out, rows, self.weight, self.scale, self.zero, self.order, bias)

    def wide(self, dtype: torch.dtype) -> torch.Tensor:
        wide = formats.dequantize_int4(self.weight, self.scale, self.zero, dtype, self.bits)
        if self.order is not None:
            wide = torch.empty_like(wide).index_copy_(0, self.order.long(), wide)
        return wide.T

    @staticmethod
    def joined(several: Sequence[Packed]) -> Packed | None:
        """Returns the weights joined along the outputs; None if bits, groups or orders differ."""
        first = several[0]
        if len({(number.bits, number.scale.shape[0]) for number in several}) > 1:
            return None
        orders = [number.order for number in several if number.order is not None]
        if len(orders) not in (0, len(several)):
            return None
        if not all(torch.equal(order, orders[0]) for order in orders):
            return None
        zero = None
        if any(number.zero is not None for number in several):
            zero = torch.cat([number.zeros() for number in several], dim=1)
        weight = torch.cat([number.weight for number in several], dim=1)
        scale = torch.cat([number.scale for number in several], dim=1)
        return Packed(weight, scale, zero, first.order, first.bits)

    def zeros(self) -> torch.Tensor:
        if self.zero is not None:
            return self.zero
        dtype = torch.int8 if self.bits == 4 else torch.uint8
        return torch.full_like(self.scale, formats.symmetric_zero(self.bits), dtype=dtype)


@dataclass(frozen=True, slots=True)
class Channels:
    """A weight with 8 bits and a scale per output."""

    kind: Kind
    weight: torch.Tensor
    scale: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    def multiply(self, ops: Ops, out: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None) -> None:
        if self.kind == "int8":
            ops.weights.linear_w8(out, rows, self.weight, self.scale, bias)
            return
        if self.kind == "llm_int8":
            self._split(ops, out, rows, bias)
            return
        product = ops.weights.linear_fp8 if self.kind == "fp8" else ops.weights.linear_w8a8
        product(out, *self._tokens(ops, rows), self.weight, self.scale, bias)

    def _split(self, ops: Ops, out: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Computes outliers by a product of their own. Outliers are chosen for each token separately, so other tokens
        do not change its result."""
        large = rows.abs() >= OUTLIER
        ops.weights.linear_w8(out, rows.where(large, 0.0), self.weight, self.scale, bias)
        rest = torch.empty_like(out)
        tokens = self._tokens(ops, rows.masked_fill(large, 0.0))
        ops.weights.linear_w8a8(rest, *tokens, self.weight, self.scale)
        out += rest

    def _tokens(self, ops: Ops, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        quantized = torch.empty_like(rows, dtype=self.weight.dtype)
        scale = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
        ops.weights.quantize_tokens(quantized, scale, rows)
        return quantized, scale

    def wide(self, dtype: torch.dtype) -> torch.Tensor:
        return (self.weight.float() * self.scale[:, None]).to(dtype)

    @staticmethod
    def joined(several: Sequence[Channels]) -> Channels | None:
        if len({number.kind for number in several}) > 1:
            return None
        weights = [number.weight.view(torch.uint8) for number in several]
        weight = torch.cat(weights).view(several[0].weight.dtype)
        return Channels(several[0].kind, weight, torch.cat([n.scale for n in several]))


def channels(kind: Kind, weight: torch.Tensor, scale: torch.Tensor) -> Channels:
    """Returns the weight in this format. Raises ModelError for a weight that the format's products cannot take."""
    multiple = _MULTIPLE.get(kind, 1)
    outputs, inputs = weight.shape
    if outputs % multiple or inputs % multiple:
        raise ModelError(
            f"{kind} needs layers whose inputs and outputs are multiples of {multiple}, "
            f"but one has {inputs} and {outputs}."
        )
    return Channels(kind, weight, scale)


def rounded(kind: Format, weight: torch.Tensor) -> Numbers:
    """Rounds a weight to nearest. int4 is symmetric, in groups as long as the layer allows, at most 128. Raises
    ModelError for a weight that the format cannot take."""
    if kind == "int4":
        inputs = weight.shape[1]
        groups = [group for group in formats.GROUPS if inputs % group == 0]
        if not groups:
            raise ModelError(
                f"int4 needs layers whose inputs can be cut into groups of {formats.GROUPS[0]}, but one has {inputs}."
            )
        return Packed(*formats.quantize_int4(weight, max(groups)), None)
    assert kind != "none"
    quantize = formats.quantize_fp8 if kind == "fp8" else formats.quantize_int8
    return channels(kind, *quantize(weight))


def linear_maker(kind: Format, ops: Ops) -> MakeLinear:
    """Returns the function that builds the layers of a model in this format. Raises ModelError if the device does not
    support it."""
    if kind == "none":
        return PackedLinear
    refuse_device(kind, ops.device)

    def make(weight: torch.Tensor, bias: torch.Tensor | None, split: Split | None = None) -> nn.Module:
        return QuantLinear(rounded(kind, weight), bias, ops, weight.dtype, split)

    return make


def refuse_device(kind: str, device: torch.device) -> None:
    if kind == "fp8" and device.type == "cuda" and not has_fp8(device):
        major, minor = torch.cuda.get_device_capability(device)
        raise ModelError(f"This GPU (capability {major}.{minor}) has no 8-bit floats: use int8.")


class QuantLinear(nn.Module):
    """A layer with a quantized weight. It takes and returns rows of any leading shape; the format is that of its
    numbers."""

    def __init__(
        self, numbers: Numbers, bias: torch.Tensor | None, ops: Ops, dtype: torch.dtype, split: Split | None = None
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = numbers.shape
        self.numbers = numbers
        self.bias = bias
        self.split = split
        self.dtype = dtype
        self._ops = ops

    def bind(self, ops: Ops) -> None:
        self._ops = ops

    @property
    def ops(self) -> Ops:
        return self._ops

    @property
    def weight(self) -> torch.Tensor:
        """The weight in the model's dtype. It is computed at every call: for comparisons, not for serving."""
        return self.numbers.wide(self.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.split is None:
            return self._product(x, self.bias)
        return self.split.apply(self._product, x, self.bias)

    def _product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features).contiguous()
        out = rows.new_empty((len(rows), self.out_features))
        if len(rows):
            self.numbers.multiply(self._ops, out, rows, bias)
        return out.view(*x.shape[:-1], self.out_features)


def bind(model: nn.Module, ops: Ops) -> None:
    """Gives every quantized layer its ops. Layers read from a checkpoint exist before the kernels are checked; from
    this call on they use the checked ones."""
    for module in model.modules():
        if isinstance(module, QuantLinear):
            module.bind(ops)


def joined(linears: Sequence[nn.Module]) -> nn.Module | None:
    """Returns one layer in place of several with the same inputs, with outputs one after the other; None if all are
    exact. Layers that differ in format or in how inputs are grouped (GPTQ's activation order) remain separate inside
    it."""
    stored = [linear for linear in linears if isinstance(linear, QuantLinear)]
    if not stored:
        return None
    if len(linears) == 1:
        return linears[0]
    together = _joined([linear.numbers for linear in stored])
    if together is None or len(stored) < len(linears):
        return _SideBySide(linears)
    first, bias = stored[0], None
    if first.bias is not None:
        biases = [linear.bias for linear in stored if linear.bias is not None]
        assert len(biases) == len(stored), "some of the layers have a bias, others none"
        bias = torch.cat(biases)
    return QuantLinear(together, bias, first.ops, first.dtype)


def _joined(several: Sequence[Numbers]) -> Numbers | None:
    packed = [numbers for numbers in several if isinstance(numbers, Packed)]
    if len(packed) == len(several):
        return Packed.joined(packed)
    eights = [numbers for numbers in several if isinstance(numbers, Channels)]
    return Channels.joined(eights) if len(eights) == len(several) else None


class _SideBySide(nn.Module):
    def __init__(self, linears: Sequence[nn.Module]) -> None:
        super().__init__()
        self._linears = nn.ModuleList(linears)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([linear(x) for linear in self._linears], dim=-1)
