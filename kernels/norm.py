"""RMSNorm, with the addition of the residual in the same pass.

Knows rows of one width. A program takes one row: it is read once, kept in registers, and written once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.device import interpreting
from kernels.specimen import Budget, Specimen

_WIDTHS = (1024, 4096, 5120)
"""Hidden sizes of the ahead-of-time gate."""


@triton.jit
def _rms_norm(
    out,
    x,
    weight,
    residual,
    eps,
    hidden,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    UPCAST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    place = row * hidden + column
    wide = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        wide += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual + place, wide.to(residual.dtype.element_ty), mask=inside)
        if not UPCAST:  # the next layer reads the rounded sum, so that is what is normalised
            wide = wide.to(residual.dtype.element_ty).to(tl.float32)
    mean = tl.sum(wide * wide, axis=0) / hidden
    scaled = wide * tl.rsqrt(mean + eps)
    if not UPCAST:
        scaled = scaled.to(x.dtype.element_ty).to(tl.float32)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, (factor * scaled).to(out.dtype.element_ty), mask=inside)


def rms_norm(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
) -> None:
    """As the twin in `kernels.reference.norm`."""
    num_tokens, hidden = x.shape
    _rms_norm[(num_tokens,)](
        out,
        x,
        weight,
        x if residual is None else residual,
        eps,
        hidden,
        BLOCK=triton.next_power_of_2(hidden),
        HAS_RESIDUAL=residual is not None,
        UPCAST=interpreting(),
        num_warps=_num_warps(hidden),
    )


def _num_warps(hidden: int) -> int:
    return min(16, max(1, triton.next_power_of_2(hidden) // 512))


def specimens(capability: int) -> Iterator[Specimen]:
    dtype = torch.bfloat16
    for hidden in _WIDTHS:
        yield Specimen(
            f"rms_norm {hidden}",
            _rms_norm,
            (dtype, dtype, dtype, dtype, 1e-6, hidden),
            {"BLOCK": triton.next_power_of_2(hidden), "HAS_RESIDUAL": True, "UPCAST": False},
            Budget(registers=64),
            num_warps=_num_warps(hidden),
        )
