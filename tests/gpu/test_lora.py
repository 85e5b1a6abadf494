"""Compiled low-rank additions against their twin, captured in a graph."""

from __future__ import annotations

import pytest
import torch
from cuda_graphs import replayed
from guarded import relative_error

from kernels import dispatch
from kernels.reference.group_rows import RowGroups
from kernels.reference.lora import TILE, workspace_size

CUDA = torch.device("cuda")


@pytest.mark.parametrize("rank", [8, 16, 64])
@pytest.mark.parametrize("rows", [1, 32, 200])
@pytest.mark.parametrize(("depth", "ends"), [(4096, (4096, 5120, 6144)), (14336, (4096,)), (1024, (3072, 6144))])
def test_additions_equal_their_twin_in_higher_precision(depth, ends, rows, rank):
    ops, dtype = dispatch.choose(CUDA), torch.bfloat16
    x, before = (torch.randn((rows, n), device=CUDA, dtype=dtype) for n in (depth, ends[-1]))
    shrink = torch.randn((8, len(ends), rank, depth), device=CUDA, dtype=dtype) / depth**0.5
    expand = torch.randn((8, ends[-1], rank), device=CUDA, dtype=dtype) / rank**0.5
    ids = torch.randint(-1, 8, (rows,), device=CUDA, dtype=torch.int32)
    groups = RowGroups.of(ids, 8, TILE)
    workspace = torch.full((workspace_size(rows, len(ends), rank),), torch.nan, device=CUDA)
    out = before.clone()

    def call() -> None:
        out.copy_(before)
        ops.weights.group_rows(groups)
        ops.weights.lora(out, x, shrink, expand, groups, ends, workspace)

    found = replayed(call, out)
    expected = before.float()
    wide = (x.float(), shrink.float(), expand.float())
    dispatch.choose(CUDA, ()).weights.lora(expected, *wide, groups, ends)
    assert relative_error(found, expected) <= 1e-2
    assert torch.equal(found[ids < 0], before[ids < 0])
