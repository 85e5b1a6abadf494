"""Copies of whole blocks over all layers: for copy-on-write, and to and from a packed staging area.

It knows layers, blocks and bytes. It does not know what is in a block: KV moves as 32-bit words, four per thread at a
time, and its scales move in the same launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.triton.device import capability
from kernels.triton.specimen import Budget, Specimen


@dataclass(frozen=True)
class Config:
    chunk: int
    """Number of words of a program."""
    num_warps: int = 4


def select(capability: int, num_words: int) -> Config:
    """Chooses 16 bytes in flight per thread, or four times as many if a block of a layer is that large."""
    return Config(2048 if num_words >= 2048 else 512)


@triton.jit
def _move_blocks(
    target,
    target_scales,
    source,
    source_scales,
    target_ids,
    source_ids,
    num_layers,
    num_target_blocks,
    num_source_blocks,
    NUM_WORDS: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    TO_STAGING: tl.constexpr,
    FROM_STAGING: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Tensors are `[num_layers, num_blocks, …]`, staging is `[n, num_layers, …]`."""
    number = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(2)
    if TO_STAGING:
        to = number * num_layers + layer
    else:
        to = layer * num_target_blocks + tl.load(target_ids + number).to(tl.int64)
    if FROM_STAGING:
        origin = number * num_layers + layer
    else:
        origin = layer * num_source_blocks + tl.load(source_ids + number).to(tl.int64)
    if chunk * CHUNK < NUM_WORDS:
        word = chunk * CHUNK + tl.arange(0, CHUNK)
        words = tl.load(source + origin * NUM_WORDS + word, mask=word < NUM_WORDS)
        tl.store(target + to * NUM_WORDS + word, words, mask=word < NUM_WORDS)
    else:  # the chunks behind those of KV are of scales
        place = (chunk - tl.cdiv(NUM_WORDS, CHUNK)) * CHUNK + tl.arange(0, CHUNK)
        scales = tl.load(source_scales + origin * NUM_SCALES + place, mask=place < NUM_SCALES)
        tl.store(target_scales + to * NUM_SCALES + place, scales, mask=place < NUM_SCALES)


def block_copy(
    kv: torch.Tensor, source: torch.Tensor, target: torch.Tensor, kv_scales: torch.Tensor | None = None
) -> None:
    """Does the same as its twin in `kernels.reference.kv`."""
    _launch(kv, kv_scales, kv, kv_scales, target, source)


def gather_blocks(
    staging: torch.Tensor,
    kv: torch.Tensor,
    ids: torch.Tensor,
    staging_scales: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Does the same as its twin in `kernels.reference.kv`."""
    _launch(staging, staging_scales, kv, kv_scales, None, ids)


def scatter_blocks(
    kv: torch.Tensor,
    staging: torch.Tensor,
    ids: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
    staging_scales: torch.Tensor | None = None,
) -> None:
    """Does the same as its twin in `kernels.reference.kv`."""
    _launch(kv, kv_scales, staging, staging_scales, ids, None)


def _launch(
    to: torch.Tensor,
    to_scales: torch.Tensor | None,
    origin: torch.Tensor,
    origin_scales: torch.Tensor | None,
    target_ids: torch.Tensor | None,
    source_ids: torch.Tensor | None,
) -> None:
    """Launches one copy. If the ids of a side are None, that side is staging, in order."""
    ids = target_ids if target_ids is not None else source_ids
    assert ids is not None
    if len(ids) == 0:
        return
    num_layers = origin.shape[0] if source_ids is not None else origin.shape[1]
    target, source = to.view(torch.int32), origin.view(torch.int32)
    num_words = target[0, 0].numel()
    num_scales = 0 if to_scales is None else to_scales[0, 0].numel()
    config = select(capability(to.device), num_words)
    chunks = triton.cdiv(num_words, config.chunk) + triton.cdiv(num_scales, config.chunk)
    _move_blocks[(len(ids), num_layers, chunks)](
        target,
        target if to_scales is None else to_scales,
        source,
        source if origin_scales is None else origin_scales,
        ids if target_ids is None else target_ids,
        ids if source_ids is None else source_ids,
        num_layers,
        to.shape[1],
        origin.shape[1],
        NUM_WORDS=num_words,
        NUM_SCALES=num_scales,
        TO_STAGING=target_ids is None,
        FROM_STAGING=source_ids is None,
        CHUNK=config.chunk,
        num_warps=config.num_warps,
    )


def specimens(capability: int) -> Iterator[Specimen]:
    # bf16 blocks of 16 tokens, 8 heads of 128, copied; int8 ones with scales packed; a tiny model's blocks unpacked
    for name, words, scales, ways in (
        ("block_copy", 2 * 8 * 16 * 128 // 2, 0, (False, False)),
        ("gather_blocks int8", 2 * 8 * 16 * 128 // 4, 2 * 8 * 16, (True, False)),
        ("scatter_blocks small", 2 * 1 * 4 * 64 // 2, 0, (False, True)),
    ):
        yield _specimen(capability, name, words, scales, *ways)


def _specimen(capability: int, name: str, words: int, scales: int, to_staging: bool, from_staging: bool) -> Specimen:
    config = select(capability, words)
    word, scale = torch.int32, torch.float32 if scales else torch.int32
    args: tuple[Any, ...] = (word, scale, word, scale, torch.int64, torch.int64, 32, 4000, 4000)
    return Specimen(
        name,
        _move_blocks,
        args,
        {
            "NUM_WORDS": words,
            "NUM_SCALES": scales,
            "TO_STAGING": to_staging,
            "FROM_STAGING": from_staging,
            "CHUNK": config.chunk,
        },
        Budget(registers=48),
        config.num_warps,
    )
