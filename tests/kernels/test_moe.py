"""Mixture of experts: the twin against float64, the Triton kernels in the interpreter against it."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from guarded import Guarded, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import dispatch
from kernels.reference.moe import MoeWorkspace, tile_of
from kernels.triton.products import moe

TWIN = dispatch.choose(torch.device("cpu"))
TRITON = dispatch.choose(torch.device("cpu"), {"moe", "route_experts"})
BOTH = pytest.mark.parametrize("ops", [TWIN, TRITON], ids=["twin", "triton"])
DTYPES = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def route(ops, logits: torch.Tensor, top_k: int, renormalise: bool):
    weights = Guarded((len(logits), top_k), torch.float32)
    experts = Guarded((len(logits), top_k), torch.int32)
    ops.weights.route_experts(weights.tensor, experts.tensor, logits, renormalise)
    weights.check()
    experts.check()
    return weights.tensor, experts.tensor


@BOTH
@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (8, 2), (60, 4), (128, 8), (8, 8)])
def test_the_largest_shares_are_chosen(ops, num_experts, top_k, renormalise):
    logits = 4 * draw(7, num_experts)
    weights, experts = route(ops, logits, top_k, renormalise)
    shares = logits.double().softmax(-1)
    chosen, order = shares.topk(top_k)
    assert torch.equal(experts, order.to(torch.int32))
    expected = chosen / chosen.sum(-1, keepdim=True) if renormalise else chosen
    assert relative_error(weights, expected) <= 1e-6


@BOTH
def test_of_equal_experts_the_lower_ones_are_chosen(ops):
    weights, experts = route(ops, torch.zeros((2, 6)), 4, True)
    assert experts.tolist() == [[0, 1, 2, 3]] * 2
    assert weights.tolist() == [[0.25] * 4] * 2


@BOTH
def test_experts_are_distinct_where_all_other_shares_vanish(ops):
    logits = torch.full((1, 5), -300.0)
    logits[0, 3] = 300
    _, experts = route(ops, logits, 3, True)
    assert experts.tolist() == [[3, 0, 1]]


def experts_of(ops, x, gate_up, down, weights, experts, workspace=None) -> torch.Tensor:
    out = Guarded(tuple(x.shape), x.dtype)
    ops.weights.moe(out.tensor, x, gate_up, down, weights, experts, workspace)
    out.check()
    return out.tensor


def exact(x, gate_up, down, weights, experts) -> torch.Tensor:
    result = torch.zeros(x.shape, dtype=torch.float64)
    for token, choice in itertools.product(range(len(x)), range(experts.shape[1])):
        expert = int(experts[token, choice])
        if expert >= 0:
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            inner = gate / (1 + (-gate).exp()) * up
            result[token] += weights[token, choice].double() * (down[expert].double() @ inner)
    return result


def layer(num_experts: int, hidden: int, inner: int, dtype=torch.float32):
    gate_up = draw(num_experts, 2 * inner, hidden, dtype=torch.float64) / hidden**0.5
    down = draw(num_experts, hidden, inner, dtype=torch.float64) / inner**0.5
    return gate_up.to(dtype), down.to(dtype)


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_the_experts_of_a_token_are_those_of_float64(ops, dtype, top_k):
    x = draw(6, 40, dtype=dtype)
    told = (x, *layer(4, 40, 24, dtype), *route(TWIN, draw(6, 4), top_k, True))
    assert relative_error(experts_of(ops, *told), exact(*told)) <= DTYPES[dtype]


CHOICES = {
    "all to one expert": [[2, 1]] * 9,
    "two empty experts": [[0, 3], [3, 0], [0, 3]],
    "padding rows": [[1, 0], [-1, -1], [2, -1]],
    "no row at all": [[-1, -1]],
    "one token": [[3, 1]],
}


@BOTH
@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_uneven_choices_are_computed(ops, choice):
    experts = torch.tensor(choice, dtype=torch.int32)
    weights = draw(*experts.shape).abs()
    if choice == [[-1, -1]]:
        weights.fill_(float("nan"))  # never read
    told = (draw(len(choice), 33), *layer(4, 33, 17), weights, experts)
    found, expected = experts_of(ops, *told), exact(*told)
    assert relative_error(found + 1, expected + 1) <= 1e-6


@pytest.mark.parametrize(("hidden", "inner"), [(31, 32), (32, 31), (33, 33), (130, 64)])
def test_every_edge_of_tiles_is_computed(hidden, inner):
    told = (draw(3, hidden), *layer(3, hidden, inner), *route(TWIN, draw(3, 3), 2, False))
    assert relative_error(experts_of(TRITON, *told), exact(*told)) <= 1e-6


def test_tall_tiles_give_the_same():
    """A prefill: 48 pairs for each of two experts are three tiles of 16 or one of 64."""
    told = (draw(96, 24), *layer(2, 24, 16), *route(TWIN, draw(96, 2), 1, True))
    assert tile_of(96, 2) == 64
    assert relative_error(experts_of(TRITON, *told), experts_of(TWIN, *told)) <= 1e-6


def test_only_the_workspace_is_written_on_the_way():
    x = draw(5, 32)
    gate_up, down = layer(3, 32, 16)
    weights, experts = route(TWIN, draw(5, 3), 2, True)
    shape = MoeWorkspace.of(experts, x, down)
    activated, products = Guarded((10, 16), torch.float32), Guarded((10, 32), torch.float32)
    workspace = dataclasses.replace(shape, activated=activated.tensor, products=products.tensor)
    found = experts_of(TRITON, x, gate_up, down, weights, experts, workspace)
    activated.check()
    products.check()
    assert relative_error(found, exact(x, gate_up, down, weights, experts)) <= 1e-6


@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 40), st.integers(1, 40), st.data())
@settings(max_examples=8, deadline=None)
def test_drawn_shapes_agree_with_the_twin(num_tokens, num_experts, hidden, inner, data):
    top_k = data.draw(st.integers(1, num_experts))
    routed = route(TWIN, draw(num_tokens, num_experts), top_k, True)
    told = (draw(num_tokens, hidden), *layer(num_experts, hidden, inner), *routed)
    assert relative_error(experts_of(TRITON, *told), experts_of(TWIN, *told)) <= 2e-6


@pytest.mark.parametrize("capability", [80, 90])
def test_every_shape_has_a_configuration_that_is_compiled_ahead(capability):
    compiled = {
        (told["TILE"], told["GATED"], told["BLOCK_N"], told["BLOCK_K"], s.num_warps, s.num_stages)
        for s in moe.specimens(capability)
        if "TILE" in (told := s.constants)
    }
    for num_pairs, num_experts in itertools.product((1, 8, 64, 4096, 131_072), (1, 8, 60, 128, 256)):
        for gated in (False, True):
            tile = tile_of(num_pairs, num_experts)
            config = moe.select(capability, tile, gated, 2)
            assert (tile, gated, *dataclasses.astuple(config)) in compiled
