"""Prepares the inputs of a decode step on the device, from the device rows of running sequences, and feeds drawn tokens
back.

It knows device rows. No value that changes from step to step comes from the host, so both can be captured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.arguments.batch import DeviceRows, StepInputs
from kernels.triton.device import capability
from kernels.triton.specimen import Budget, Specimen


@dataclass(frozen=True)
class Config:
    block: int
    """Number of entries of a block table, or of rows, of a program."""
    num_warps: int


def select(capability: int) -> Config:
    return Config(1024, 4)


def select_advance(capability: int) -> Config:
    return Config(128, 4)


@triton.jit
def _input_prep(
    token_ids,
    positions,
    slots,
    seq_lens,
    block_table,
    last_tokens,
    row_positions,
    row_table,
    active,
    max_blocks,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0)
    row = tl.load(active + place)
    is_real = row >= 0
    row = tl.maximum(row, 0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = tl.where(is_real, max_blocks, 0)
    blocks = tl.load(row_table + row * max_blocks + column, mask=column < known, other=0)
    target = block_table + place.to(tl.int64) * max_blocks + column
    tl.store(target, blocks, mask=column < max_blocks)
    if tl.program_id(1) == 0:
        position = tl.load(row_positions + row, mask=is_real, other=0)
        tl.store(positions + place, position.to(positions.dtype.element_ty))
        token = tl.load(last_tokens + row, mask=is_real, other=0)
        tl.store(token_ids + place, token.to(token_ids.dtype.element_ty))
        tl.store(seq_lens + place, tl.where(is_real, position + 1, 0))
        entry = row_table + row * max_blocks + position // BLOCK_SIZE
        slot = tl.load(entry, mask=is_real, other=0) * BLOCK_SIZE + position % BLOCK_SIZE
        tl.store(slots + place, tl.where(is_real, slot, -1).to(slots.dtype.element_ty))


@triton.jit
def _advance_rows(last_tokens, row_positions, active, tokens, bucket, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(active + place, mask=place < bucket, other=-1)
    is_real = row >= 0
    token = tl.load(tokens + place, mask=is_real, other=0)
    tl.store(last_tokens + row, token.to(last_tokens.dtype.element_ty), mask=is_real)
    position = tl.load(row_positions + row, mask=is_real, other=0)
    tl.store(row_positions + row, position + 1, mask=is_real)


def input_prep(inputs: StepInputs, rows: DeviceRows, active: torch.Tensor, block_size: int) -> None:
    """Does the same as its twin in `kernels.reference.rows`."""
    max_blocks = rows.block_table.shape[1]
    config = select(capability(active.device))
    _input_prep[(len(active), triton.cdiv(max_blocks, config.block))](
        inputs.token_ids,
        inputs.positions,
        inputs.slots,
        inputs.seq_lens,
        inputs.block_table,
        rows.last_tokens,
        rows.positions,
        rows.block_table,
        active,
        max_blocks,
        BLOCK_SIZE=block_size,
        BLOCK=config.block,
        num_warps=config.num_warps,
    )


def advance_rows(rows: DeviceRows, active: torch.Tensor, tokens: torch.Tensor) -> None:
    """Does the same as its twin in `kernels.reference.rows`."""
    config = select_advance(capability(active.device))
    _advance_rows[(triton.cdiv(len(active), config.block),)](
        rows.last_tokens, rows.positions, active, tokens, len(active), BLOCK=config.block, num_warps=config.num_warps
    )


def specimens(capability: int) -> Iterator[Specimen]:
    long, short = torch.int64, torch.int32
    config = select(capability)
    outputs = (long, long, short, short, short)
    yield Specimen(
        "input_prep",
        _input_prep,
        (*outputs, long, short, short, short, 2048),
        {"BLOCK_SIZE": 16, "BLOCK": config.block},
        Budget(registers=40),
        config.num_warps,
    )
    config = select_advance(capability)
    yield Specimen(
        "advance_rows",
        _advance_rows,
        (long, short, short, long, 64),
        {"BLOCK": config.block},
        Budget(registers=32),
        config.num_warps,
    )
