"""Adapters of rank 16 on the projections of Llama-8B at decode sizes, another adapter every few rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from benchmarks.kernels.case import Case, Prepared
from kernels import dispatch
from kernels.reference.group_rows import RowGroups
from kernels.reference.lora import TILE, workspace_size

_DTYPE = torch.bfloat16
_SHAPES = {"8B qkv": (4096, (4096, 5120, 6144)), "8B down": (14336, (4096,))}


def cases(tiny: bool) -> Iterator[Case]:
    shapes = {"tiny": (64, (32, 48))} if tiny else _SHAPES
    for name, (depth, ends) in shapes.items():
        for rows, num_adapters in [(5, 2)] if tiny else [(1, 1), (32, 8), (256, 8)]:
            yield Case(
                "lora",
                f"rows {rows}, adapters {num_adapters}, rank 16, {name}, bf16",
                lambda device, m=rows, a=num_adapters, d=depth, e=ends: _prepare(device, m, a, d, e, tiny),
                in_graph=True,
            )


def _prepare(
    device: torch.device, rows: int, num_adapters: int, depth: int, ends: tuple[int, ...], tiny: bool
) -> Prepared:
    """Sets of adapters are rotated: in a step every layer has its own."""
    ops, rank, num_sets = dispatch.choose(device), 16, 2 if tiny else 32
    x = torch.randn((rows, depth), device=device, dtype=_DTYPE)
    before = torch.randn((rows, ends[-1]), device=device, dtype=_DTYPE)
    out = before.clone()
    shape = (num_sets, num_adapters, len(ends), rank, depth)
    shrink = torch.randn(shape, device=device, dtype=_DTYPE) / depth**0.5
    expand = torch.randn((num_sets, num_adapters, ends[-1], rank), device=device, dtype=_DTYPE) / 4
    ids = (torch.arange(rows, device=device) % num_adapters).to(torch.int32)
    groups = RowGroups.of(ids, num_adapters, TILE)
    ops.weights.group_rows(groups)
    space = torch.empty(workspace_size(rows, len(ends), rank), device=device)
    turn = itertools.cycle(range(num_sets))

    def call(one: int) -> None:
        ops.weights.lora(out, x, shrink[one], expand[one], groups, ends, space)

    def error() -> float:
        out.copy_(before)
        call(0)
        expected = before.double()
        for row, adapter in enumerate(ids.tolist()):
            for part, (first, end) in enumerate(itertools.pairwise((0, *ends))):
                inner = shrink[0, adapter, part].double() @ x[row].double()
                expected[row, first:end] += expand[0, adapter, first:end].double() @ inner
        difference = (out.double() - expected).abs().nan_to_num(torch.inf)
        return float(difference.max() / expected.abs().max())

    def gathered() -> None:
        one = next(turn)
        inner = torch.einsum("mk,mprk->mpr", x, shrink[one][ids])
        torch.einsum("mr,mnr->mn", inner[:, 0], expand[one][ids])

    num_bytes = 2 * (shrink[0].numel() + expand[0].numel() + x.numel() + 2 * out.numel())
    flops = 2 * rows * rank * (depth * len(ends) + ends[-1])
    peers = {"torch, gathered": gathered}
    return Prepared(lambda: call(next(turn)), error, 2e-2, num_bytes, flops, peers)
