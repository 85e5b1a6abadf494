"""Linear layers of a CPU worker: weights are reordered once for the library that multiplies, instead of at every call.

It knows weights and their products. It does not know which layer it is in. Where there are compiled products
(`kernels.cpu`) they take the weights of every size that fits their panels. Elsewhere weights of 16 bits are multiplied
by oneDNN if the CPU has instructions for them. Otherwise such products would be emulated, so the weights have 16 bits
in memory only: FBGEMM widens them in registers and computes in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional as F

from kernels.cpu import compiled, instructions

_ROWS_HINT = 32
"""Number of rows that the reordering is tuned for; every other number works with the same weight."""
MIN_ROWS = 4
"""A CPU pass is padded to at least this many tokens. Four rows take no longer than one, and oneDNN sums the products of
a single row in another order than those of two and more. With padding, a token's result does not depend on how many
others share its step. FBGEMM sums every row alike, if their number is a multiple of `_fbgemm_rows()`."""
_HALF_LOSS = 2.0**-16
"""Largest share of a weight's norm that float16 may lose. Numbers of bfloat16 above 7.6e-6 fit exactly, those below are
rounded to multiples of 6e-8."""


@dataclass(frozen=True, slots=True)
class Split:
    """The rule by which a layer's output is made from the outputs of the ranks' parts."""

    join: Callable[[torch.Tensor], torch.Tensor]
    inputs: slice | None = None
    """The slice of a whole input that this rank's part takes; None means that the input is this rank's own."""

    def apply(
        self, product: Callable[[torch.Tensor, None], torch.Tensor], x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns the whole output. The bias belongs to the whole layer: it is added once, after the join."""
        own = x if self.inputs is None else x[..., self.inputs]
        whole = self.join(product(own, None))
        return whole if bias is None else whole + bias


MakeLinear = Callable[[torch.Tensor, torch.Tensor | None, Split | None], nn.Module]
"""A function that builds a layer from a weight `[out_features, in_features]`, its bias and its split over ranks."""


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


class Product(Protocol):
    """The product of rows `[num_rows, in_features]` with a weight that was brought into its layout."""

    num_bytes: int
    """Bytes that the weight takes."""
    is_wide: bool
    """True if inputs and outputs are float32 without a loss, whatever the weight's dtype is."""
    is_alone: bool
    """True if a row's result has the same bits among any number of other rows."""

    def __call__(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor: ...


class PlainProduct:
    is_wide = is_alone = False

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight
        self.num_bytes = weight.nbytes

    def __call__(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(rows, self._weight, bias)


class OneDnnProduct:
    is_wide = is_alone = False

    def __init__(self, weight: torch.Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)
        self.num_bytes = weight.nbytes

    def __call__(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, bias, "none", [], "")
        return out


class HalfProduct:
    """A product with 16 bits per weight in memory, and float32 in registers and sums. A row's result has the same bits
    among any number of other rows and with any number of threads."""

    is_wide = is_alone = True

    def __init__(self, weight: torch.Tensor) -> None:
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), None)
        self.num_bytes = 2 * weight.numel()

    def __call__(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        num_rows = len(rows)
        whole = F.pad(rows.float(), (0, 0, 0, -num_rows % _fbgemm_rows()))
        out: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(whole, self._packed)[:num_rows]
        if bias is not None:
            out += bias
        return out.to(rows.dtype)


class PanelProduct:
    """The same as `HalfProduct`, for weights of 16 or 32 bits, by a compiled function of our own
    (`kernels.cpu.panels`)."""

    is_alone = True

    def __init__(self, weight: torch.Tensor) -> None:
        from kernels.cpu import panels  # needs numba

        self._product = panels.product
        self.panels = panels.pack(weight.contiguous(), kind_of(weight))
        self.num_bytes = weight.nbytes
        self.is_wide = self.panels.input_dtype == torch.float32

    def __call__(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = self._product(rows.to(self.panels.input_dtype), self.panels)
        if bias is not None:
            out += bias
        return out.to(rows.dtype)


class PackedLinear(nn.Module):
    """`F.linear` on a reordered weight. The original is kept only if nothing can reorder it. `weight` has the shape and
    dtype for modules that ask their layers for these, but no values: a module that computes with it fails, and the
    trial before a worker is ready finds that (`trial.run`)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, split: Split | None = None) -> None:
        super().__init__()
        self.split = split
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.weight = weight.to("meta")
        # This is not a parameter: the layout is opaque, and only its own product may read it.
        self.product = product_of(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.split is None:
            return self._product(x, self.bias)
        return self.split.apply(self._product, x, self.bias)

    def _product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if x.numel() == 0:
            return x.new_empty((*x.shape[:-1], self.out_features))
        if x.dim() == 2:
            return self.product(x, bias)
        out = self.product(x.reshape(-1, self.in_features), bias)
        return out.view(*x.shape[:-1], self.out_features)


def product_of(weight: torch.Tensor) -> Product:
    if not can_pack(weight):
        return PlainProduct(weight)
    if _has_panels(weight):
        return PanelProduct(weight)
    if widens(weight.dtype) and _fits_half(weight):
        return HalfProduct(weight)
    return OneDnnProduct(weight) if _onednn_packs(weight.dtype) else PlainProduct(weight)


@cache
def _fbgemm_rows() -> int:
    """Returns a number of rows whose multiples FBGEMM divides among kernels that all sum a row in the same order. With
    registers of 256 bits its kernels of one and of two rows have sums of their own, which it takes for the rest of some
    numbers of rows, such as 7 and 14, but of no multiple of three (measured for 1 to 400 rows on a Zen 3)."""
    return 1 if instructions.has("avx512") else 3


def widens(dtype: torch.dtype) -> bool:
    """Returns whether this CPU multiplies such weights in float32, because it has no instructions for them."""
    return dtype in (torch.bfloat16, torch.float16) and _has_fbgemm() and not _multiplies(dtype)


def _fits_half(weight: torch.Tensor) -> bool:
    wide = weight.float()
    lost = (wide - wide.half().float()).norm()
    return bool(lost <= _HALF_LOSS * wide.norm())  # false where one is too large: inf, then NaN


def _has_panels(weight: torch.Tensor) -> bool:
    """Returns whether the compiled product takes the weight."""
    fits = weight.dtype in (torch.float32, torch.bfloat16) and weight.shape[1] % 16 == 0
    return fits and compiled.functions() is not None


def kind_of(weight: torch.Tensor) -> int:
    """Returns the kind of product in panels (`kernels.cpu.product`)."""
    from kernels.cpu import product, tiles  # need numba

    if weight.dtype == torch.float32:
        return product.FLOATS
    if tiles.are_there() and weight.shape[1] % tiles.INPUTS == 0:
        return product.TILED
    return product.PAIRED if _pairs(weight.dtype) else product.WIDENED


@cache
def _pairs(dtype: torch.dtype) -> bool:
    """Returns whether pairs of bfloat16 are multiplied faster than float32. AMD and Intel both have the instruction;
    Intel's takes as long as the four of float32 that it replaces."""
    return dtype == torch.bfloat16 and instructions.has("bf16") and compiled.cpu_name().startswith("znver")


@cache
def _has_fbgemm() -> bool:
    return "fbgemm" in torch.backends.quantized.supported_engines


def _multiplies(dtype: torch.dtype) -> bool:
    """Returns whether the CPU multiplies this dtype in hardware."""
    if dtype == torch.float16:
        return instructions.has("amx_fp16")
    return instructions.has("bf16") or instructions.has("amx")


def can_pack(weight: torch.Tensor) -> bool:
    on_cpu = weight.device.type == "cpu"
    return on_cpu and (widens(weight.dtype) or _onednn_packs(weight.dtype))


@cache
def _onednn_packs(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def pack_linears(model: nn.Module, make: MakeLinear = PackedLinear, head: nn.Module | None = None) -> int:
    """Replaces every plain linear layer by one of `make`, and the `head` by a packed one; returns their number. A
    weight that something else still uses (a tied embedding) is kept for that use."""
    number = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and type(child) in (nn.Linear, SplitLinear):
                split = getattr(child, "split", None)
                layer = PackedLinear if child is head else make
                setattr(module, name, layer(child.weight.detach(), child.bias, split))
                number += 1
    return number
