"""Mixture of experts: the choice of a token's experts, and their products, grouped by expert.

It knows tokens, experts and their weights. A tile of the grouped products holds pairs of one expert (`group_rows`), so
its weight is read once per tile; every pair has its own row in the intermediate tensors, and a last launch adds the
experts of a token in the order they were chosen.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.reference.moe import MAX_TOP_K, MoeWorkspace
from kernels.triton.device import capability as capability_of
from kernels.triton.device import interpreting
from kernels.triton.products.group_rows import group_rows
from kernels.triton.specimen import Budget, Specimen

_COMBINE_BLOCK = 1024


@triton.jit
def _silu(gate):
    return gate / (1.0 + tl.exp2(gate * -1.4426950408889634))


@dataclass(frozen=True)
class Config:
    block_n: int
    """Number of output columns; a gated tile reads twice as many rows of the weight."""
    block_k: int
    num_warps: int
    num_stages: int


def select(capability: int, tile: int, gated: bool, itemsize: int) -> Config:
    """Chooses the configuration. `tile` is the number of pairs of a tile, 16 or 64. `itemsize` is the bytes of an
    element."""
    if itemsize > 2:
        return Config(32, 32, 4, 3)
    stages = 4 if capability >= 90 else 3
    if tile == 16:
        return Config(32, 128, 4, stages)
    return Config(64 if gated else 128, 64, 4, stages)


@triton.jit
def _route(
    weights,
    experts,
    logits,
    num_experts,
    RENORMALISE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token: the largest is taken and struck out, as often as experts are chosen."""
    row = tl.program_id(0)
    expert = tl.arange(0, BLOCK)
    choice = tl.arange(0, BLOCK_K)
    logit = tl.load(
        logits + row.to(tl.int64) * num_experts + expert, mask=expert < num_experts, other=float("-inf")
    ).to(tl.float32)
    share = tl.exp2((logit - tl.max(logit, axis=0)) * 1.4426950408889634)
    total = tl.sum(share, axis=0)
    chosen = tl.zeros((BLOCK_K,), tl.float32)
    ids = tl.zeros((BLOCK_K,), tl.int32)
    share = tl.where(expert < num_experts, share, -1.0)
    for index in tl.static_range(TOP_K):
        best = tl.argmax(share, axis=0)
        chosen = tl.where(choice == index, tl.max(share, axis=0), chosen)
        ids = tl.where(choice == index, best, ids)
        share = tl.where(expert == best, -1.0, share)
    if RENORMALISE:
        total = tl.sum(chosen, axis=0)
    place = row * TOP_K + choice
    tl.store(weights + place, chosen / total, mask=choice < TOP_K)
    tl.store(experts + place, ids, mask=choice < TOP_K)


@triton.jit
def _grouped(
    out,
    x,
    weight,
    rows,
    tiles,
    width,
    in_features,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Computes row p of `out` `[num_pairs, width]` = row p // TOP_K of `x` times the weight of the tile's expert.
    GATED: the weight has gate rows, then up rows, and silu(gate) · up is written."""
    expert = tl.load(tiles + tl.program_id(0))
    if expert < 0:
        return
    pair = tl.load(rows + tl.program_id(0) * TILE + tl.arange(0, TILE))
    alive = (pair >= 0)[:, None]
    pair = tl.where(pair >= 0, pair, 0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < width
    k = tl.arange(0, BLOCK_K)
    base = expert.to(tl.int64) * (width * 2 if GATED else width)
    start_of = weight + (base + column)[:, None] * in_features
    up_of = weight + (base + width + column)[:, None] * in_features
    token_of = x + (pair // TOP_K)[:, None] * in_features
    acc = tl.zeros((TILE, BLOCK_N), tl.float32)
    up_acc = tl.zeros((TILE, BLOCK_N), tl.float32)
    for start in range(0, in_features, BLOCK_K):
        there = (start + k < in_features)[None, :]
        left = tl.load(token_of + (start + k)[None, :], mask=alive & there, other=0.0)
        tile = tl.load(start_of + (start + k)[None, :], mask=inside[:, None] & there, other=0.0)
        if UPCAST:
            left = left.to(tl.float32)
            tile = tile.to(tl.float32)
        acc = tl.dot(left, tile.T, acc, input_precision="ieee")
        if GATED:
            other = tl.load(up_of + (start + k)[None, :], mask=inside[:, None] & there, other=0.0)
            if UPCAST:
                other = other.to(tl.float32)
            up_acc = tl.dot(left, other.T, up_acc, input_precision="ieee")
    if GATED:
        acc = _silu(acc) * up_acc
    place = pair[:, None] * width + column[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=alive & inside[None, :])


@triton.jit
def _combine(out, products, weights, experts, hidden, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for index in tl.static_range(TOP_K):
        pair = row * TOP_K + index
        chosen = tl.load(experts + pair) >= 0
        written = tl.where(chosen, hidden, 0)  # a pair of no expert was not
        place = pair.to(tl.int64) * hidden + column
        product = tl.load(products + place, mask=column < written, other=0.0).to(tl.float32)
        total += product * tl.where(chosen, tl.load(weights + pair), 0.0)
    place = row.to(tl.int64) * hidden + column
    tl.store(out + place, total.to(out.dtype.element_ty), mask=column < hidden)


def route_experts(weights: torch.Tensor, experts: torch.Tensor, logits: torch.Tensor, renormalise: bool) -> None:
    """Computes the same as its twin in `kernels.reference.moe`."""
    num_tokens, num_experts = logits.shape
    top_k = weights.shape[1]
    _route[(num_tokens,)](
        weights,
        experts,
        logits,
        num_experts,
        RENORMALISE=renormalise,
        TOP_K=top_k,
        BLOCK_K=triton.next_power_of_2(top_k),
        BLOCK=triton.next_power_of_2(num_experts),
        num_warps=1,
    )


def moe(
    out: torch.Tensor,
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    workspace: MoeWorkspace | None = None,
) -> None:
    """Computes the same as its twin in `kernels.reference.moe`."""
    if workspace is None:
        workspace = MoeWorkspace.of(experts, x, down)
    num_tokens, top_k = experts.shape
    hidden = x.shape[1]
    group_rows(workspace.groups)
    _multiply(workspace.activated, x, gate_up, workspace, top_k, gated=True)
    _multiply(workspace.products, workspace.activated, down, workspace, 1, gated=False)
    _combine[(num_tokens, triton.cdiv(hidden, _COMBINE_BLOCK))](
        out, workspace.products, weights, experts, hidden, TOP_K=top_k, BLOCK=_COMBINE_BLOCK, num_warps=4
    )


def _multiply(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, workspace: MoeWorkspace, top_k: int, gated: bool
) -> None:
    groups = workspace.groups
    width = out.shape[1]
    config = _config(x.device, groups.tile, gated, x.itemsize)
    _grouped[(len(groups.tiles), triton.cdiv(width, config.block_n))](
        out,
        x,
        weight,
        groups.rows,
        groups.tiles,
        width,
        x.shape[1],
        TOP_K=top_k,
        GATED=gated,
        TILE=groups.tile,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        UPCAST=interpreting(),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


@functools.lru_cache(maxsize=64)
def _config(device: torch.device, *shape: Any) -> Config:
    return select(capability_of(device), *shape)


def specimens(capability: int) -> Iterator[Specimen]:
    dtype, wide, number = torch.bfloat16, torch.float32, torch.int32
    yield Specimen(
        "route_experts, 8 of 128",
        _route,
        (wide, number, dtype, 128),
        {"RENORMALISE": True, "TOP_K": MAX_TOP_K, "BLOCK_K": MAX_TOP_K, "BLOCK": 128},
        Budget(64),
        num_warps=1,
    )
    for tile in (16, 64):
        for gated in (True, False):
            config = select(capability, tile, gated, 2)
            columns = config.block_n * (2 if gated else 1)
            yield Specimen(
                f"moe {'gate, up' if gated else 'down'}, {tile} pairs",
                _grouped,
                (dtype, dtype, dtype, number, number, 768, 2048),
                {
                    "TOP_K": MAX_TOP_K if gated else 1,
                    "GATED": gated,
                    "TILE": tile,
                    "BLOCK_N": config.block_n,
                    "BLOCK_K": config.block_k,
                    "UPCAST": False,
                },
                Budget(
                    registers=168 if tile == 16 else 232,
                    min_shared=(config.num_stages - 1) * columns * config.block_k * 2,
                    async_copies=True,
                    matrix_unit="wgmma" if tile == 64 and capability >= 90 else "mma",
                ),
                num_warps=config.num_warps,
                num_stages=config.num_stages,
            )
    yield Specimen(
        "moe combine, 8 experts",
        _combine,
        (dtype, dtype, wide, number, 2048),
        {"TOP_K": MAX_TOP_K, "BLOCK": _COMBINE_BLOCK},
        Budget(96),
    )
