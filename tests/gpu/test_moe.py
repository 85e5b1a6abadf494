"""Compiled routing, grouping and experts against their twins, captured in a graph."""

from __future__ import annotations

import pytest
import torch
from cuda_graphs import replayed
from guarded import relative_error

from kernels import dispatch
from kernels.reference.group_rows import RowGroups
from kernels.reference.moe import MoeWorkspace

CUDA = torch.device("cuda")


def draw(*shape: int) -> torch.Tensor:
    generator = torch.Generator(device=CUDA).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=CUDA)


def routed(ops, logits: torch.Tensor, top_k: int, renormalise: bool):
    weights = torch.full((len(logits), top_k), torch.nan, device=CUDA)
    experts = torch.full((len(logits), top_k), -7, device=CUDA, dtype=torch.int32)
    ops.weights.route_experts(weights, experts, logits, renormalise)
    return weights, experts


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (60, 4), (128, 8)])
def test_the_choice_of_experts_equals_its_twin(num_experts, top_k, renormalise):
    logits = draw(1000, num_experts)
    found = routed(dispatch.choose(CUDA), logits, top_k, renormalise)
    expected = routed(dispatch.choose(CUDA, ()), logits, top_k, renormalise)
    assert torch.equal(found[1], expected[1])
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("num_rows", "num_groups", "tile"), [(1, 1, 16), (32, 8, 16), (70_001, 128, 64)])
def test_rows_by_group_equal_the_twin(num_rows, num_groups, tile):
    ids = torch.randint(-1, num_groups, (num_rows,), device=CUDA, dtype=torch.int32)
    found, expected = (RowGroups.of(ids, num_groups, tile) for _ in range(2))
    dispatch.choose(CUDA).weights.group_rows(found)
    dispatch.choose(CUDA, ()).weights.group_rows(expected)
    assert torch.equal(found.tiles, expected.tiles)
    assert torch.equal(found.counts, expected.counts)
    used = int((expected.tiles >= 0).sum()) * tile
    assert torch.equal(found.rows[:used], expected.rows[:used])


@pytest.mark.parametrize("num_tokens", [1, 16, 64, 2000])
@pytest.mark.parametrize(("num_experts", "top_k", "hidden", "inner"), [(128, 8, 2048, 768), (8, 2, 1024, 3584)])
def test_experts_equal_their_twin_in_higher_precision(num_tokens, num_experts, top_k, hidden, inner):
    ops, dtype = dispatch.choose(CUDA), torch.bfloat16
    x = draw(num_tokens, hidden).to(dtype)
    gate_up = (draw(num_experts, 2 * inner, hidden) / hidden**0.5).to(dtype)
    down = (draw(num_experts, hidden, inner) / inner**0.5).to(dtype)
    weights, experts = routed(ops, draw(num_tokens, num_experts), top_k, True)
    expected = torch.empty((num_tokens, hidden), device=CUDA)
    wide = (x.float(), gate_up.float(), down.float())
    dispatch.choose(CUDA, ()).weights.moe(expected, *wide, weights, experts)
    out, workspace = torch.empty_like(x), MoeWorkspace.of(experts, x, down)
    found = replayed(lambda: ops.weights.moe(out, x, gate_up, down, weights, experts, workspace), out)
    assert relative_error(found, expected) <= 1e-2


def test_all_tokens_of_one_expert_and_padding_rows():
    ops, dtype = dispatch.choose(CUDA), torch.bfloat16
    x = draw(100, 512).to(dtype)
    gate_up, down = (draw(8, 512, 512) / 23).to(dtype), (draw(8, 512, 256) / 16).to(dtype)
    weights = torch.ones((100, 1), device=CUDA)
    experts = torch.full((100, 1), 5, device=CUDA, dtype=torch.int32)
    experts[90:] = -1
    expected, found = torch.empty((100, 512), device=CUDA), torch.full_like(x, torch.nan)
    wide = (x.float(), gate_up.float(), down.float())
    dispatch.choose(CUDA, ()).weights.moe(expected, *wide, weights, experts)
    ops.weights.moe(found, x, gate_up, down, weights, experts)
    assert relative_error(found, expected) <= 1e-2
    assert not bool(found[90:].any())
