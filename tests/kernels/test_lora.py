"""Low-rank additions: the twin against float64, the Triton kernels in the interpreter against both."""

from __future__ import annotations

import itertools

import pytest
import torch
from guarded import Guarded, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import dispatch
from kernels.reference.group_rows import RowGroups
from kernels.reference.lora import TILE, workspace_size
from kernels.triton.products import lora

TWIN = dispatch.choose(torch.device("cpu"))
TRITON = dispatch.choose(torch.device("cpu"), {"lora", "group_rows"})
BOTH = pytest.mark.parametrize("ops", [TWIN, TRITON], ids=["twin", "triton"])
DTYPES = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def bank(num_adapters: int, ends: tuple[int, ...], rank: int, depth: int, dtype=torch.float32):
    shrink = draw(num_adapters, len(ends), rank, depth) / depth**0.5
    return shrink.to(dtype), (draw(num_adapters, ends[-1], rank) / rank**0.5).to(dtype)


def run(ops, x, before, shrink, expand, adapters: list[int], ends, workspace=None) -> torch.Tensor:
    groups = RowGroups.of(torch.tensor(adapters, dtype=torch.int32), len(shrink), TILE)
    groups.rows.fill_(10**6)
    ops.weights.group_rows(groups)
    out = Guarded(tuple(before.shape), before.dtype)
    out.tensor.copy_(before)
    ops.weights.lora(out.tensor, x, shrink, expand, groups, ends, workspace)
    out.check()
    return out.tensor


def exact(x, before, shrink, expand, adapters: list[int], ends) -> torch.Tensor:
    result = before.double().clone()
    for row, adapter in enumerate(adapters):
        if adapter < 0:
            continue
        for part, (first, end) in enumerate(itertools.pairwise((0, *ends))):
            inner = shrink[adapter, part].double() @ x[row].double()
            result[row, first:end] += expand[adapter, first:end].double() @ inner
    return result


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ends", [(40,), (32, 72), (64, 80, 101)], ids=str)
def test_each_row_gets_the_addition_of_its_adapter(ops, dtype, ends):
    adapters = [2, -1, 0, 2, 0, -1, 2]
    told = (draw(7, 70, dtype=dtype), draw(7, ends[-1], dtype=dtype))
    told = (*told, *bank(3, ends, 8, 70, dtype), adapters, ends)
    assert relative_error(run(ops, *told), exact(*told)) <= DTYPES[dtype]


@BOTH
@pytest.mark.parametrize("rank", [8, 16, 24, 32, 64])
def test_every_rank_is_computed(ops, rank):
    told = (draw(3, 65), draw(3, 33), *bank(2, (33,), rank, 65), [1, 0, 1], (33,))
    assert relative_error(run(ops, *told), exact(*told)) <= 1e-6


@pytest.mark.parametrize("adapters", [[-1, -1], [0] * 17, [1] * 16 + [0], [0]], ids=len)
def test_tiles_of_one_adapter_and_of_none_are_computed(adapters):
    rows = len(adapters)
    told = (draw(rows, 40), draw(rows, 24), *bank(2, (24,), 16, 40), adapters, (24,))
    found, expected = run(TRITON, *told), exact(*told)
    assert relative_error(found, expected) <= 1e-6
    without = [row for row, adapter in enumerate(adapters) if adapter < 0]
    assert torch.equal(found[without], told[1][without])


@pytest.mark.parametrize("depth", [511, 512, 513, 1100])
def test_splits_are_added_within_the_workspace(depth):
    told = (draw(3, depth), draw(3, 48), *bank(2, (16, 48), 8, depth), [1, 0, -1], (16, 48))
    workspace = Guarded((workspace_size(3, 2, 8),), torch.float32)
    assert relative_error(run(TRITON, *told, workspace.tensor), exact(*told)) <= 1e-6
    workspace.check()


def test_a_row_is_the_same_whatever_adapters_its_neighbours_have():
    x, before = draw(4, 600), draw(4, 32)
    shrink, expand = bank(3, (32,), 16, 600)
    together = run(TRITON, x, before, shrink, expand, [1, 0, 2, 1], (32,))
    alone = run(TRITON, x, before, shrink, expand, [1, -1, -1, -1], (32,))
    assert torch.equal(alone[0], together[0])


@given(
    st.lists(st.integers(-1, 2), min_size=1, max_size=20),
    st.sampled_from([8, 16, 40]),
    st.integers(1, 90),
    st.sampled_from([(5,), (16, 21), (16, 48, 64)]),
)
@settings(max_examples=8, deadline=None)
def test_drawn_shapes_agree_with_the_twin(adapters, rank, depth, ends):
    rows = len(adapters)
    told = (draw(rows, depth), draw(rows, ends[-1]), *bank(3, ends, rank, depth), adapters, ends)
    assert relative_error(run(TRITON, *told), run(TWIN, *told)) <= 2e-6


@pytest.mark.parametrize("capability", [80, 90])
def test_every_rank_has_a_configuration_that_is_compiled_ahead(capability):
    shrinks = {
        (s.constants["BLOCK_R"], s.constants["BLOCK_K"], s.num_stages)
        for s in lora.specimens(capability)
        if "BLOCK_K" in s.constants
    }
    expands = {
        (s.constants["BLOCK_R"], s.constants["BLOCK_N"]) for s in lora.specimens(capability) if "BLOCK_N" in s.constants
    }
    for rank, depth in itertools.product(range(8, 65, 8), (576, 1024, 4096, 14336)):
        config = lora.select(capability, rank, depth, 64, 2)
        assert (config.block_r, config.block_k, config.num_stages) in shrinks
        assert (config.block_r, config.block_n) in expands
