"""The second launch of a product: it sums the splits in a fixed order, then applies scales and bias.

It knows partial sums `[splits, num_tokens, columns]`. It does not know weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

import kernels.triton.device  # noqa: F401  # sets how Triton rounds, before anything is compiled
from kernels.reference.linear import MAX_SPLITS, workspace_size
from kernels.triton.specimen import Budget, Specimen

_JOIN_BLOCK = 256
_WANTED_PROGRAMS = 256
"""Number of programs to aim for: about two on each of the 132 multiprocessors of an H200."""
_MIN_SPLIT = 256
"""Least in_features of a split: fewer would only fill the pipeline."""


def num_splits(num_tiles: int, in_features: int) -> int:
    """Returns the number of splits, a power of two; 1 means one launch."""
    splits = 1
    while (
        num_tiles * splits < _WANTED_PROGRAMS * 3 // 4
        and splits < MAX_SPLITS
        and in_features >= 2 * splits * _MIN_SPLIT
    ):
        splits *= 2
    return splits


@triton.jit
def affine(total, factor, scale, bias, column, inside, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Returns total · factor of the row · scale of the column + bias."""
    total *= factor
    if HAS_SCALE:
        total *= tl.load(scale + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["num_tokens"])
def join_partials(
    out,
    partials,
    scale,
    row_scale,
    bias,
    num_tokens,
    width,
    SPLITS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Joins a part of one row: its partial sums in the order of the splits, and what comes behind the product."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partials + (split * num_tokens + row) * width + column, mask=inside, other=0.0)
    factor = 1.0
    if HAS_ROW_SCALE:
        factor = tl.load(row_scale + row)
    value = affine(total, factor, scale, bias, column, inside, HAS_SCALE, HAS_BIAS)
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Around:
    """Operations on a product's sums: a scale of each row, a scale of each column, a bias of each column."""

    bias: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    row_scale: torch.Tensor | None = None

    @property
    def flags(self) -> dict[str, bool]:
        return {
            "HAS_SCALE": self.scale is not None,
            "HAS_ROW_SCALE": self.row_scale is not None,
            "HAS_BIAS": self.bias is not None,
        }


def join(out: torch.Tensor, partials: torch.Tensor, around: Around, splits: int) -> None:
    num_tokens, width = out.shape
    join_partials[(num_tokens, triton.cdiv(width, _JOIN_BLOCK))](
        out,
        partials,
        out if around.scale is None else around.scale,
        out if around.row_scale is None else around.row_scale,
        out if around.bias is None else around.bias,
        num_tokens,
        width,
        SPLITS=splits,
        **around.flags,
        BLOCK=_JOIN_BLOCK,
        num_warps=4,
    )


def space(workspace: torch.Tensor | None, x: torch.Tensor, out_features: int, in_features: int) -> torch.Tensor:
    """Returns the given workspace, or one allocated for this call, which is possible only outside of captured steps."""
    if workspace is not None:
        return workspace
    size = workspace_size(len(x), out_features, in_features, x.dtype)
    return torch.empty(size, dtype=torch.float32, device=x.device)


def join_specimen() -> Specimen:
    """Returns a specimen with every operation that can follow a product."""
    dtype, wide = torch.bfloat16, torch.float32
    return Specimen(
        "linear join 16 splits",
        join_partials,
        (dtype, wide, wide, wide, dtype, 16, 4096),
        {"SPLITS": MAX_SPLITS, **dict.fromkeys(Around().flags, True), "BLOCK": _JOIN_BLOCK},
        Budget(registers=96),
    )
