"""RMSNorm, with the addition of the residual in the same pass, and optionally with 8-bit output.

It knows rows of one width. Up to `_LONGEST` columns a row is read once and kept in registers; longer rows are read
again for each pass over them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.triton.device import capability, interpreting
from kernels.triton.quant import LIMITS, encode, scale_of
from kernels.triton.specimen import Budget, Specimen

_LONGEST = 16_384
_BLOCKS = (128, 512, 1024, 2048, 4096, 8192, _LONGEST)


@dataclass(frozen=True)
class Config:
    block: int
    """Number of columns that a program holds at a time."""
    rows: int
    """Number of rows of a program; narrow rows (heads) share one program."""
    num_warps: int
    long: bool = False


def select(capability: int, hidden: int) -> Config:
    if hidden > _LONGEST:
        return Config(4096, 1, 8, long=True)
    block = next(block for block in _BLOCKS if hidden <= block)
    return Config(block, max(1, 1024 // block), min(16, max(2, block // 512)))


@triton.jit
def _factor(weight, column, inside, PLUS_ONE: tl.constexpr):
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if PLUS_ONE:
        factor += 1.0
    return factor


@triton.jit
def _rms_norm(
    out,
    out_scales,
    x,
    weight,
    residual,
    num_rows,
    eps,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    CAST_FIRST: tl.constexpr,
    LIMIT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < num_rows)[:, None] & (column < HIDDEN)
    place = row.to(tl.int64)[:, None] * HIDDEN + column
    wide = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        wide += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual + place, wide.to(residual.dtype.element_ty), mask=inside)
        if not UPCAST:  # the next layer reads the rounded sum, so that is what is normalised
            wide = wide.to(residual.dtype.element_ty).to(tl.float32)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide, axis=1) / HIDDEN + eps)[:, None]
    if CAST_FIRST and not UPCAST:
        scaled = scaled.to(x.dtype.element_ty).to(tl.float32)
    normed = _factor(weight, column, column < HIDDEN, PLUS_ONE) * scaled
    if LIMIT > 0.0:
        scale, inverse = scale_of(tl.max(tl.abs(normed), axis=1), LIMIT)
        tl.store(out_scales + row, scale, mask=row < num_rows)
        normed = encode(normed, inverse[:, None], LIMIT)
    tl.store(out + place, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _normed_part(
    x, weight, place, column, inside, factor, PLUS_ONE: tl.constexpr, CAST_FIRST: tl.constexpr, UPCAST: tl.constexpr
):
    scaled = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) * factor
    if CAST_FIRST and not UPCAST:
        scaled = scaled.to(x.dtype.element_ty).to(tl.float32)
    return _factor(weight, column, inside, PLUS_ONE) * scaled


@triton.jit
def _rms_norm_long(
    out,
    out_scales,
    x,
    weight,
    residual,
    num_rows,
    eps,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    CAST_FIRST: tl.constexpr,
    LIMIT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    row = tl.program_id(0)
    first = row.to(tl.int64) * HIDDEN
    lane = tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, HIDDEN, BLOCK):
        inside = start + lane < HIDDEN
        place = first + start + lane
        wide = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            wide += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
            tl.store(residual + place, wide.to(residual.dtype.element_ty), mask=inside)
            if not UPCAST:
                wide = wide.to(residual.dtype.element_ty).to(tl.float32)
        squares += wide * wide
    factor = tl.rsqrt(tl.sum(squares, axis=0) / HIDDEN + eps)
    source = x
    if HAS_RESIDUAL:  # the sums that other threads of this program have stored
        tl.debug_barrier()
        source = residual
    inverse = 1.0
    if LIMIT > 0.0:
        largest = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, HIDDEN, BLOCK):
            column = start + lane
            inside = column < HIDDEN
            normed = _normed_part(source, weight, first + column, column, inside, factor, PLUS_ONE, CAST_FIRST, UPCAST)
            largest = tl.maximum(largest, tl.abs(normed))
        scale, inverse = scale_of(tl.max(largest, axis=0), LIMIT)
        tl.store(out_scales + row, scale)
    for start in range(0, HIDDEN, BLOCK):
        column = start + lane
        inside = column < HIDDEN
        normed = _normed_part(source, weight, first + column, column, inside, factor, PLUS_ONE, CAST_FIRST, UPCAST)
        if LIMIT > 0.0:
            normed = encode(normed, inverse, LIMIT)
        tl.store(out + first + column, normed.to(out.dtype.element_ty), mask=inside)


def rms_norm(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    plus_one: bool = False,
    cast_first: bool = True,
    out_scales: torch.Tensor | None = None,
) -> None:
    """Computes the same as its twin in `kernels.reference.norm`."""
    num_rows, hidden = x.shape
    config = select(capability(x.device), hidden)
    kernel = _rms_norm_long if config.long else _rms_norm
    kernel[(triton.cdiv(num_rows, config.rows),)](
        out,
        out if out_scales is None else out_scales,
        x,
        weight,
        x if residual is None else residual,
        num_rows,
        eps,
        HIDDEN=hidden,
        ROWS=config.rows,
        BLOCK=config.block,
        HAS_RESIDUAL=residual is not None,
        PLUS_ONE=plus_one,
        CAST_FIRST=cast_first,
        LIMIT=LIMITS[out.dtype],
        UPCAST=interpreting(),
        num_warps=config.num_warps,
        enable_fp_fusion=False,
    )


_SPECIMENS = (
    # hidden, residual, Gemma's product, output, registers
    (128, False, False, torch.bfloat16, 64),
    (300, True, True, torch.bfloat16, 64),
    (1024, True, False, torch.bfloat16, 64),
    (2048, True, True, torch.int8, 64),
    (4096, True, False, torch.float8_e4m3fn, 64),
    (5120, True, False, torch.bfloat16, 64),
    (16_384, True, False, torch.int8, 128),
    (53_248, True, False, torch.int8, 96),
)


def specimens(capability: int) -> Iterator[Specimen]:
    dtype = torch.bfloat16
    for hidden, has_residual, gemma, out, registers in _SPECIMENS:
        if out is torch.float8_e4m3fn and capability < 89:
            out = torch.int8
        config = select(capability, hidden)
        limit = LIMITS[out]
        yield Specimen(
            f"rms_norm {hidden} {str(out)[6:]}{' gemma' if gemma else ''}",
            _rms_norm_long if config.long else _rms_norm,
            (out, torch.float32 if limit else out, dtype, dtype, dtype, 64, 1e-6),
            {
                "HIDDEN": hidden,
                "ROWS": config.rows,
                "BLOCK": config.block,
                "HAS_RESIDUAL": has_residual,
                "PLUS_ONE": gemma,
                "CAST_FIRST": not gemma,
                "LIMIT": limit,
                "UPCAST": False,
            },
            Budget(registers=registers),
            num_warps=config.num_warps,
            options={"enable_fp_fusion": False},
        )
